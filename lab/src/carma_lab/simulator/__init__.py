"""The simulator: a heap of events and a virtual clock drive the core of the daemon."""

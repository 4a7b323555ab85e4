"""The simulator: a heap of events and a virtual clock drive the very same core as the daemon."""

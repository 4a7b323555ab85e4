"""Recorded runs, simulated or real: the file format, its figures, and the tasks of a server as a run."""

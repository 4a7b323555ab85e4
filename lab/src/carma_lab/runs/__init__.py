"""A run on record, simulated or real: the file format, its figures, and how a server's tasks become one."""

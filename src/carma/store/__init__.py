"""Durable storage: the log of events, checkpoints, finished tasks and past runs.

`sqlite.SqliteStore` is the real store, `memory.MemoryStore` a store without a file; one contract suite covers both.
"""

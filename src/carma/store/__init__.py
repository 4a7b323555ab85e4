"""Where CARMA remembers: the log of durable events, its checkpoint, finished tasks and past runs.

`sqlite.SqliteStore` is the real one; `memory.MemoryStore` keeps the same contract without a file.
"""

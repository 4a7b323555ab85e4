"""The daemon: one process that owns the queue, the GPUs and the database.

An event travels through these modules:

1. `api/` and `http/` turn a request of a user (`auth.py`) into a change; `loop.py` turns samples, and reports of the
   launcher (`found_attempts.py`), into changes and observations.
2. `shell.py` holds the state and queues the changes.
3. `writer.py` commits them, steps them through the core, and asks the core for proposals.
4. `executor.py` carries out the commands that follow: estimates (`estimating.py`), launches, signals.

`main.py` and `startup/` start the process, `server.py` builds the parts, `recovery_on_start.py` continues from the
log and the last checkpoint (`state_checkpoint.py`). `views/` is the state as the API shows it, `probes/` checks files
with the rights of their user, `housekeeping.py` removes what is old.
"""

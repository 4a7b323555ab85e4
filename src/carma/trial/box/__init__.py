"""The sandbox of a trial run: namespaces, a copy-on-write view of the file system, limits. Standard library only.

It runs in a process of its own (`run.py`), never inside the daemon: what it does to itself cannot be undone. Processes:

    run.py (enter, watch)   outside the pid namespace; builds the box, watches the limits, reports to the daemon
      pid 1 (watch.first)   does nothing; when it is killed, the kernel kills every process of the box
      pid 2 (command)       the user's command
"""

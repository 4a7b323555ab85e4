"""A program in a box: namespaces, a copy-on-write view of the file system, limits. Standard library only.

It runs in a process of its own (`run.py`), never inside the daemon: what it does to itself cannot be undone.
"""

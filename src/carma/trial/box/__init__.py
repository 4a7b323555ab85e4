"""The sandbox of a trial run: namespaces, a copy-on-write view of the file system, limits. Standard library only.

It runs in a process of its own (`main.py`), never in the daemon, because it changes itself irreversibly. Processes:

    main.py (namespaces, supervisor)   outside the pid namespace; builds the sandbox, checks limits, reports
      pid 1 (supervisor.be_first)      does nothing; when it is killed, the kernel kills every process of the sandbox
      pid 2 (command)                  the user's command
"""

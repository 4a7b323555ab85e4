"""The program of the sandbox: `python -I -S main.py`, with the order as one line of JSON on standard input.

It is small because Python compiles a script at each start, but imported modules once. Standard input stays open as long
as the sandbox may run: when the caller is gone, the sandbox ends.
"""

import os
import sys

if __name__ == "__main__":
    root = os.path.dirname(os.path.abspath(__file__))
    for _ in range(3):
        root = os.path.dirname(root)
    sys.path.append(root)  # last: behind the standard library
    from carma.trial.box.namespaces import main

    sys.exit(main())

"""The program that makes the box: `python -I -S run.py`, the order as one line of JSON on standard input.

Tiny because a script is compiled anew at each start, while the modules that it imports are compiled once. Standard
input stays open for as long as the box may live: when whoever ordered it is gone, so is the box.
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

"""The program that stands over one attempt: `python -I -S runner.py ATTEMPT_DIRECTORY`.

It runs isolated (-I -S), so neither the user's PYTHONPATH nor anything in site-packages is loaded; the package's own
folder goes last on the path, behind the standard library. This file stays tiny because a script is compiled anew at
each start, while the modules that it imports are compiled once.
"""

import os
import sys

if __name__ == "__main__":
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from carma.launch.supervisor import main

    sys.exit(main(sys.argv[1]))

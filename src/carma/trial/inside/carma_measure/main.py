"""Entry point of the measuring program: ``python main.py --out DIR``.

The directory above takes the place of this one on the module path, so that the package has its own name and no other
directory of CARMA is on the module path of the user's interpreter.
"""

from __future__ import annotations

import importlib
import os
import sys

PACKAGE = os.path.dirname(os.path.abspath(__file__))


def run_command() -> int:
    """Run the command of the package."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != PACKAGE]
    sys.path.insert(0, os.path.dirname(PACKAGE))
    return int(importlib.import_module(os.path.basename(PACKAGE) + ".command").main())


if __name__ == "__main__":
    sys.exit(run_command())

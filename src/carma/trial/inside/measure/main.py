"""Entry point of the measuring program: ``python main.py --out DIR``.

It loads the package from this directory under the name ``carma_measure``, so that no directory of CARMA is on the
module path of the user's interpreter.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

PACKAGE = "carma_measure"


def load_command() -> int:
    """Load the package beside this file and run its command."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
    spec = importlib.util.spec_from_file_location(
        PACKAGE, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {folder}")
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)
    return int(importlib.import_module(PACKAGE + ".command").main())


if __name__ == "__main__":
    sys.exit(load_command())

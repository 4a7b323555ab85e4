"""Runs at the start of every Python process of a trial run, and attaches the emulated GPU when torch is imported.

Python finds it through PYTHONPATH, before a `sitecustomize` of the user's, which is run as well.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run(name, spec):
    """Imports the module of this spec under this name."""
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _follow_torch():
    """The package `carma_trial` is imported without putting its directory on the script's path."""
    folder = os.path.join(os.path.dirname(_HERE), "carma_trial")
    file = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location("carma_trial", file, submodule_search_locations=[folder])
    _run("carma_trial", spec).follow_torch()


def _run_users_own():
    """The `sitecustomize` that this file hides."""
    elsewhere = [folder for folder in sys.path if os.path.abspath(folder or os.getcwd()) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        _run("sitecustomize", spec)


if os.environ.get("CARMA_TRACE_OUT"):
    _follow_torch()
_run_users_own()

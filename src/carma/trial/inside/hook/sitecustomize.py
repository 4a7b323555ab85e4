"""Gets into every Python that a trial run starts: attaches the made-up GPU to torch when the script imports it.

Found by Python through PYTHONPATH, before any `sitecustomize` of the user's, which is run as well.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _load_trial():
    """The package `carma_trial`, without putting its folder on the script's path."""
    folder = os.path.join(os.path.dirname(_HERE), "carma_trial")
    spec = importlib.util.spec_from_file_location(
        "carma_trial", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["carma_trial"] = module
    spec.loader.exec_module(module)
    return module


class _Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        trial = _load_trial()
        trial.before_torch(os.path.dirname(module.__spec__.origin))
        self._loader.exec_module(module)
        trial.after_torch(module)

    def __getattr__(self, name):  # `get_source`, `get_filename`, ...: as the real one answers
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def _users_own():
    """Run the `sitecustomize` that this file hides."""
    elsewhere = [folder for folder in sys.path if os.path.abspath(folder or os.getcwd()) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("CARMA_TRACE_OUT"):
    sys.meta_path.insert(0, _Finder())
_users_own()

"""Changes to modules that the script may import later, or never: importing them for it would take its time."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys

_wanted = {}  # name of the module -> what to do with it


def when_imported(name, change):
    if name in sys.modules:
        change(sys.modules[name])
        return
    if not _wanted:
        sys.meta_path.insert(0, _Finder())
    _wanted[name] = change


class _Loader(importlib.abc.Loader):
    def __init__(self, loader, change):
        self._loader, self._change = loader, change

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        self._change(module)

    def __getattr__(self, name):  # `get_source`, `get_filename`, ...: as the real one answers
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        change = _wanted.pop(name, None)
        if change is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, change)
        return spec

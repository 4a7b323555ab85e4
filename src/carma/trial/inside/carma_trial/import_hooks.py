"""Calls functions when the script imports a module: importing it for the script would take time."""

import importlib.abc
import importlib.machinery
import sys

_wanted = {}  # name of a module -> functions to call before and after its code runs


def when_imported(name, after, before=None):
    """Both functions get the module. `before` is left out for a module that is imported already."""
    if name in sys.modules:
        after(sys.modules[name])
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _wanted[name] = before, after


class _Loader(importlib.abc.Loader):
    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        before, after = _wanted.pop(module.__name__, (None, None))
        if before is not None:
            before(module)
        self._loader.exec_module(module)
        if after is not None:
            after(module)

    def __getattr__(self, name):  # `get_source`, `get_filename`, ...: as the real one answers
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        """Also called by scripts that only ask whether the module exists."""
        if name not in _wanted:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


_FINDER = _Finder()

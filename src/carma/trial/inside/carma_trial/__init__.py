"""The part of a trial run inside the user's interpreter. Only the standard library and torch may be imported here.

hook/sitecustomize.py calls `follow_torch` at the start of each Python process of a trial run. A module that the script
may never use is changed when the script imports it (`when_imported`): importing it here would take time.
"""

import functools
import importlib.abc
import importlib.machinery
import os
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


def replaces(holder, *names):
    """A decorator: the function takes the place of these functions of the holder, and gets the replaced one first."""

    def replace(function):
        for name in names:
            setattr(holder, name, _with_first(function, getattr(holder, name)))
        return function

    return replace


def _with_first(function, plain):
    @functools.wraps(plain)  # some libraries read the names of the parameters
    def replacement(*args, **words):
        return function(plain, *args, **words)

    return replacement


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


class _HookFinder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        """Also called by scripts that only ask whether the module exists."""
        if name not in _wanted:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


_FINDER = _HookFinder()


def follow_torch():
    when_imported("torch", before=_before_torch, after=_after_torch)
    when_imported("torch._compile", after=_leave_unwrapped)
    when_imported("torch.optim.optimizer", after=_step_without_compiler)


def _before_torch(module):
    """Torch looks for its CUDA hooks while it is imported, so the compiled part is loaded first."""
    from . import build, gpu_processes, report

    gpu_processes.begin()
    try:
        build.load(os.path.dirname(module.__spec__.origin))
    except build.CannotBuild as error:
        report.refuse("unsupported", str(error))


def _after_torch(_module):
    from . import attach

    attach.attach()


# A trial run compiles nothing. Torch imports its compiler at the first call of some functions, to keep it away from
# them, which takes as long as the import of torch.


def _leave_unwrapped(module):
    def unwrapped(function=None, recursive=True):
        return unwrapped if function is None else function

    module._disable_dynamo = unwrapped


def _step_without_compiler(module):
    """The decorator of optimizers' `step`."""

    def use_grad_for_differentiable(function):
        @functools.wraps(function)
        def step(self, *args, **words):
            with module.torch.set_grad_enabled(self.defaults["differentiable"]):
                return function(self, *args, **words)

        return step

    module._use_grad_for_differentiable = use_grad_for_differentiable

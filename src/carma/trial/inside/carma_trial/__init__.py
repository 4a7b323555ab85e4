"""The part of a trial run inside the user's interpreter. Only the standard library and torch may be imported here.

hook/sitecustomize.py calls `follow_torch` at the start of each Python process of a trial run.
"""

import functools
import os

from .import_hooks import when_imported


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

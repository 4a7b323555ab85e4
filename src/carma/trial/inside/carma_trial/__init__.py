"""A trial run, seen from inside the user's interpreter: only the standard library and torch may be imported here."""

import os

from . import build, gpu_processes, report


def before_torch(torch_folder):
    """Torch looks for its CUDA hooks when it is imported, so the shim has to be there first."""
    gpu_processes.begin()
    try:
        build.load(torch_folder)
    except build.CannotBuild as error:
        report.refuse("unsupported", str(error))


def after_torch(torch):
    from . import attach

    os.environ.pop("CARMA_TRACE_FIRST", None)
    attach.attach(torch)

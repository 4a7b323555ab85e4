"""What NVML's errors mean to a sampler: a metric that is absent, a GPU that is lost, or a driver that is gone.

NVML answers each call with a number (nvml.h, `nvmlReturn_t`). Most of them only say that one figure is not to be had,
now or ever, and a sample then carries None. A few say that the card, or the driver as a whole, cannot be used.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

Nvml = Any  # the pynvml module, or a scripted one; it has no types of its own


class Code(IntEnum):
    """The numbers of nvml.h that matter here; written out because older bindings do not name all of them."""

    SUCCESS = 0
    UNINITIALIZED = 1
    INVALID_ARGUMENT = 2
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    INSUFFICIENT_SIZE = 7
    DRIVER_NOT_LOADED = 9
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    LIB_RM_VERSION_MISMATCH = 18
    IN_USE = 19
    MEMORY = 20
    NO_DATA = 21
    INSUFFICIENT_RESOURCES = 23
    ARGUMENT_VERSION_MISMATCH = 25
    DEPRECATED = 26
    NOT_READY = 27
    GPU_NOT_FOUND = 28
    UNKNOWN = 999


_DRIVER_GONE = frozenset(
    {Code.UNINITIALIZED, Code.DRIVER_NOT_LOADED, Code.LIBRARY_NOT_FOUND, Code.LIB_RM_VERSION_MISMATCH}
)
_GPU_LOST = frozenset({Code.GPU_IS_LOST, Code.RESET_REQUIRED, Code.GPU_NOT_FOUND})
# This figure will not come, however often it is asked for.
_NEVER = frozenset(
    {
        Code.INVALID_ARGUMENT,
        Code.NOT_SUPPORTED,
        Code.NO_PERMISSION,
        Code.FUNCTION_NOT_FOUND,
        Code.ARGUMENT_VERSION_MISMATCH,
        Code.DEPRECATED,
    }
)
# There is nothing to list. pynvml raises "success" where it expected a list and the driver had no entries.
_NOTHING = frozenset({Code.SUCCESS, Code.NOT_FOUND})
# A living card says these too: the figure is not offered, or somebody else is reading the counter just now.
_ALIVE = (_NEVER - {Code.INVALID_ARGUMENT}) | {
    Code.INSUFFICIENT_SIZE,
    Code.IN_USE,
    Code.MEMORY,
    Code.NO_DATA,
    Code.INSUFFICIENT_RESOURCES,
    Code.NOT_READY,
}


class GpuLost(Exception):
    """This GPU cannot be used; the text is NVML's."""


class DriverGone(Exception):
    """NVML as a whole has to be opened again; the text is NVML's."""


def ask(nvml: Nvml, function: str, *arguments: object, heartbeat: bool = False, nothing: object = None) -> Any:
    """The answer, or None where the figure is not to be had. Raises GpuLost and DriverGone, nothing else of NVML's.

    `nothing` is the answer where NVML says that it has no entries, which a list can tell apart from a refusal.

    `heartbeat` marks the one question that every working card answers: there, an error that a living card would not
    give ("Unknown Error", a stale handle after a reset) counts as a lost GPU and not as a missing figure.
    """
    call = getattr(nvml, function, None)
    if call is None:  # an older binding
        return None
    try:
        return call(*arguments)
    except nvml.NVMLError as error:
        code = code_of(error)
        if code in _DRIVER_GONE:
            raise DriverGone(str(error)) from error
        if code in _NOTHING and nothing is not None:
            return nothing
        if code in _GPU_LOST or (heartbeat and code not in _ALIVE):
            raise GpuLost(str(error)) from error
        return None
    except UnicodeDecodeError:  # a name that is not text: the binding decodes it
        return None


def offers(nvml: Nvml, function: str, *arguments: object) -> bool:
    """Whether a figure can be had at all. A counter that is only busy now can."""
    call = getattr(nvml, function, None)
    if call is None:
        return False
    try:
        call(*arguments)
    except nvml.NVMLError as error:
        code = code_of(error)
        if code in _DRIVER_GONE:
            raise DriverGone(str(error)) from error
        return code not in _NEVER
    return True


def code_of(error: Exception) -> int:
    return int(getattr(error, "value", Code.UNKNOWN))

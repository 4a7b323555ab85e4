"""The meaning of NVML's errors for a sampler: a missing figure, a lost GPU, or a driver that has gone.

NVML answers each call with a number (nvml.h, `nvmlReturn_t`). Most of them only say that one figure is not available,
now or ever; a sample then has None. A few say that the card, or the driver as a whole, cannot be used.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

Nvml = Any  # the pynvml module, or a scripted one; it has no types of its own
MIB = 1 << 20
NOT_GIVEN_32 = (1 << 32) - 1
NOT_GIVEN_64 = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE


class Code(IntEnum):
    """Numbers of nvml.h; written out because older bindings do not name all of them."""

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


_DRIVER_GONE = {Code.UNINITIALIZED, Code.DRIVER_NOT_LOADED, Code.LIBRARY_NOT_FOUND, Code.LIB_RM_VERSION_MISMATCH}
_GPU_LOST = {Code.GPU_IS_LOST, Code.RESET_REQUIRED, Code.GPU_NOT_FOUND}
# The figure will never be available.
_NEVER = {Code.INVALID_ARGUMENT, Code.NOT_SUPPORTED, Code.NO_PERMISSION, Code.FUNCTION_NOT_FOUND}
_NEVER |= {Code.ARGUMENT_VERSION_MISMATCH, Code.DEPRECATED}
# There is nothing to list. pynvml raises "success" if it expected a list and the driver had no entries.
_NOTHING = {Code.SUCCESS, Code.NOT_FOUND}
# Errors of a working card: the figure is not offered, or another process reads the counter at the moment.
_WORKING = _NEVER - {Code.INVALID_ARGUMENT} | {Code.INSUFFICIENT_SIZE, Code.IN_USE, Code.MEMORY, Code.NO_DATA}
_WORKING |= {Code.INSUFFICIENT_RESOURCES, Code.NOT_READY}


class GpuLost(Exception):
    """This GPU cannot be used; the text is NVML's."""


class DriverGone(Exception):
    """NVML has to be opened again; the text is NVML's."""


def ask(nvml: Nvml, function: str, *arguments: object, heartbeat: bool = False, nothing: object = None) -> Any:
    """The answer, or None if the figure is not available. Raises GpuLost and DriverGone, no other error of NVML.

    `nothing` is the answer if NVML has no entries to list, which differs from a refusal.

    `heartbeat` marks a query that every working card answers: an error that a working card does not return ("Unknown
    Error", a stale handle after a reset) then means a lost GPU instead of a missing figure.
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
        if code in _GPU_LOST or (heartbeat and code not in _WORKING):
            raise GpuLost(str(error)) from error
        return None
    except UnicodeDecodeError:  # a name that is no text: the binding decodes it
        return None


def offers(nvml: Nvml, function: str, *arguments: object) -> bool:
    """Whether a figure is available at all. A counter that is only busy now is."""
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

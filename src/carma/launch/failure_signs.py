"""Recognises in the last output of a program that it ran out of memory, or that MPS failed it.

This is not a search for words. The text is read for *ends* (the exception of a traceback, a C++ terminate, a raw CUDA
error line). The last end that does not merely repeat another one decides, and only an end of a known form counts. A
warning, a path or a model called BLOOM is not an end. An error that was caught is followed by another end, or by
further output.

MPS failures are CUDA's errors 805 to 810, in the texts of cudaGetErrorString and cuGetErrorString. PyTorch puts "CUDA
error:" before them, or the name of the call ("Unexpected error from cudaGetDeviceCount() … Error 805: …"); other
programs print the name of the error.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

OUTPUT_LIMIT = 40  # lines after an end beyond which the program evidently went on
MESSAGE_LIMIT = 300
_MESSAGE_LINES = 200  # TensorFlow's message holds a traceback of its own


class OomSign(NamedTuple):
    where: Literal["gpu", "host"]
    message: str
    asked_mib: int | None
    peak_mib: int | None


class End(NamedTuple):
    """An exception's class and message, or a raw error line (class '')."""

    line: int
    kind: str
    message: str
    caused: bool = False  # "the direct cause of the following exception" stands before it


_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Prefixes of the lines of workers: torchrun's [rank0]:, Ray's (f pid=12), mpirun's [1,0]<stderr>:
_PREFIX = re.compile(
    r"^(?:\[(?:rank|default)?\d+\]:\s?|\(\w[\w.\[\]()]* pid=\d+[^)]*\)\s?|\[\d+,\d+\]<std(?:err|out)>:\s?)"
)
_HEADER = re.compile(r"^\s*(?:\+ )?(?:Exception Group )?Traceback \(most recent call last\)")
_EXCEPTION = re.compile(r"^((?:[\w<>]+\.)*[A-Za-z_]\w*(?:\(\w+\))?)(?::\s?(.*))?$")
# Without a traceback before it (cut off, or printed by a library), only a line that is clearly an exception.
_BARE = re.compile(r"^((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit))(?::\s(.*))?$")
_CAUSE = "The above exception was the direct cause of the following exception"
_IGNORED = "Exception ignored in"  # printed while the interpreter ends: not the reason of the end
_TERMINATE = re.compile(r"^terminate called after throwing an instance of '([^']+)'")
_WHAT = re.compile(r"^\s*what\(\):\s*(.*)$")

# Exceptions that only report that another process, or another exception, failed.
_ECHO = re.compile(
    r"(?:.*\.)?(?:(?:ChildFailed|CalledProcess|DistBackend|DistNetwork|DistStore)Error"
    r"|Process(?:Raised|Exited)Exception|SystemExit)"
)

_GPU_MESSAGE = re.compile(
    r"^(?:CUDA|HIP|XPU) out of memory\b"
    r"|^(?:CUDA|HIP) error: out of memory\b"
    r"|^(?:CUDA|HIP) error: (?:CUBLAS|HIPBLAS)_STATUS_ALLOC_FAILED\b"
    r"|^(?:cuDNN|MIOpen) error: CUDNN_STATUS_ALLOC_FAILED\b"
    r"|^Allocation on device\b.*\bout of memory\b"
    r"|^Out of memory allocating [\d,]+ bytes \(allocated so far"  # CuPy
    r"|^(?:\[2\] )?Call to cuMem\w+ results in (?:CUDA_ERROR_OUT_OF_MEMORY|UNKNOWN_CUDA_ERROR_2)\b"  # Numba
    r"|\bcudaErrorMemoryAllocation\b|\bCUDA_ERROR_OUT_OF_MEMORY\b"
    r"|\bCuda failure (?:2 )?'out of memory'"  # NCCL
)
_XLA_MESSAGE = re.compile(
    r"^RESOURCE_EXHAUSTED: .*?(?:Out of memory (?:while trying to allocate|allocating)|Failed to allocate request for)"
)
_TF_MESSAGE = re.compile(r"OOM when allocating tensor|failed to allocate memory|[Oo]ut of memory")
_TF_MESSAGE_END = re.compile(r"OOM when allocating tensor|\[Op:\w+\]")
_HOST_MESSAGE = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|^std::bad_alloc$|^\[Errno 12\] Cannot allocate memory"
)
# The error line of a program without exceptions. A line that a logger marks as less than an error does not count
# (TensorFlow warns with the same words before it tries a smaller block).
_RAW = re.compile(
    r"^(?:\S+:\s+)*(?:CUDA|cuda|Cuda)(?: runtime)? [Ee]rror\b.{0,200}\bout of memory\b"
    r"|^GPUassert: out of memory\b"
    r"|^.{0,200}\((?:cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY)\)"
    r"|^(?:\S+:\s+)*(?:[Ee]rror:? )?(?:cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY)\b"
)
# The errors 805 to 810 of CUDA, by their texts and by their names.
_MPS_MESSAGE = re.compile(
    r"\bMPS client failed to connect to the MPS control daemon\b"
    r"|\bremote procedural call between the MPS server and the MPS client failed\b"
    r"|\bMPS server is not ready to accept new MPS client requests\b"
    r"|\bhardware resources required to create (?:an )?MPS client have been exhausted\b"
    r"|\bhardware resources required to support device connections have been exhausted\b"
    r"|\bMPS client has been terminated by the server\b"
    r"|\bcudaErrorMps(?:ConnectionFailed|RpcFailure|ServerNotReady|MaxClientsReached|MaxConnectionsReached|ClientTerminated)\b"
    r"|\bCUDA_ERROR_MPS_[A-Z_]+\b"
)
_RAW_MPS = re.compile(r"^(?:\S+:\s+)*(?:GPUassert|(?:CUDA|cuda|Cuda)(?: runtime)? [Ee]rror)\b")
_LESSER = re.compile(r"\b(?:[Ww]arn(?:ing)?|WARN(?:ING)?|INFO|DEBUG)\b|^[WI]\d{4}\b|: [WI] ")

_ASKED = re.compile(
    r"(?:[Tt]ried to allocate|trying to allocate|allocating|allocate request for|Unable to allocate)\s+"
    r"([\d,]+(?:\.\d+)?)\s?(bytes|B|[KMGT]iB|[KMGT]B)\b"
)
_HELD = re.compile(r"this process has ([\d.]+) (bytes|[KMGT]iB) memory in use")
_CAPACITY = re.compile(r"total capacity of ([\d.]+) (bytes|[KMGT]iB)")
_TENSOR = re.compile(r"OOM when allocating tensor with shape\[([\d,]*)\] and type (\w+)")
_BYTES = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BYTES |= {"KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40}  # older versions print KB for KiB
_TENSOR_BYTES = {"half": 2, "bfloat16": 2, "float": 4, "double": 8, "int32": 4, "int64": 8}
_TENSOR_BYTES |= dict.fromkeys(("int8", "uint8", "bool"), 1)


def find_oom(text: str) -> OomSign | None:
    """The OOM that ended the program; None if the text ends otherwise."""
    end = deciding_end(text)
    return judge(end) if end is not None else None


def find_mps_failure(text: str) -> str:
    """The line of the MPS failure that ended the program; '' if the text ends otherwise."""
    end = deciding_end(text)
    return one_line(end) if end is not None and _MPS_MESSAGE.search(end.message.partition("\n")[0]) else ""


def last_exception(text: str) -> str:
    """The line of the deciding end, for the message of an ordinary failure; '' if there is none."""
    end = deciding_end(text)
    return one_line(end) if end is not None else ""


def deciding_end(text: str) -> End | None:
    lines = clean(text)
    ends = find_ends(lines)
    if not ends or (not is_echo(ends[-1]) and lines_after(lines, ends[-1]) > OUTPUT_LIMIT):
        return None
    return next((end for end in reversed(ends) if judge(end) is not None or not is_echo(end)), ends[-1])


def lines_after(lines: list[str], end: End) -> int:
    """Number of lines after an end that are not part of its message."""
    last = end.line
    if end.kind.endswith("ResourceExhaustedError"):
        own = lines[last : last + _MESSAGE_LINES]
        last += max((place for place, line in enumerate(own) if _TF_MESSAGE_END.search(line)), default=0)
    return sum(1 for line in lines[last + 1 :] if line.strip())


def is_echo(end: End) -> bool:
    return end.caused or _ECHO.fullmatch(end.kind) is not None


def clean(text: str) -> list[str]:
    """Lines as a terminal shows them: without colours and prefixes of workers, each state of a progress bar apart."""
    plain = _ESCAPES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return [_PREFIX.sub("", line).rstrip() for line in plain.split("\n")]


def find_ends(lines: list[str]) -> list[End]:
    ends: list[End] = []
    in_traceback = caused = ignored = False
    for number, line in enumerate(lines):
        if _HEADER.match(line):
            in_traceback = True
        elif line.startswith(_IGNORED):
            ignored = True
        elif line.startswith(_CAUSE):
            caused = True
        elif not line or line[0].isspace():
            continue
        elif (end := end_at(lines, number, in_traceback)) is not None:
            if not ignored:
                ends.append(end._replace(caused=caused))
            in_traceback = caused = ignored = False
        else:
            in_traceback = False
    return ends


def end_at(lines: list[str], number: int, in_traceback: bool) -> End | None:
    line = lines[number]
    if match := _TERMINATE.match(line):
        what = next((w[1] for w in map(_WHAT.match, lines[number + 1 : number + 3]) if w), "")
        return End(number, match[1].replace("::", "."), what)
    if match := (_EXCEPTION if in_traceback else _BARE).match(line):
        return End(number, match[1], message_at(lines, number, match[2] or ""))
    if _LESSER.search(line):
        return None
    if _RAW.match(line) or (_RAW_MPS.match(line) and _MPS_MESSAGE.search(line)):
        return End(number, "", line)
    return None


def message_at(lines: list[str], number: int, first: str) -> str:
    """The first line and its continuation, up to the next traceback or exception."""
    parts = [first]
    for line in lines[number + 1 : number + 1 + _MESSAGE_LINES]:
        if _HEADER.match(line) or _BARE.match(line) or line.startswith(_CAUSE):
            break
        parts.append(line)
    return "\n".join(parts).strip()


def judge(end: End) -> OomSign | None:
    """The OOM, if this end is one by its class and message."""
    where = place_of(end)
    if where is None:
        return None
    return OomSign(where, one_line(end), asked_mib(end.message), peak_mib(end.message))


def place_of(end: End) -> Literal["gpu", "host"] | None:
    name = end.kind.rpartition(".")[2]
    first = end.message.partition("\n")[0]
    if name in ("MemoryError", "_ArrayMemoryError", "ArrayMemoryError", "bad_alloc") or _HOST_MESSAGE.search(first):
        return "host"
    if (not name and not _MPS_MESSAGE.search(first)) or _GPU_MESSAGE.search(first):
        return "gpu"
    if name == "DistBackendError" and _GPU_MESSAGE.search(end.message):
        return "gpu"
    if _XLA_MESSAGE.search(first):
        return "gpu"
    if name == "ResourceExhaustedError" and _TF_MESSAGE.search(end.message):
        return "host" if re.search(r"device:CPU:\d+ by allocator|by allocator (?:mkl)?cpu", end.message) else "gpu"
    return None


def one_line(end: End) -> str:
    first = end.message.partition("\n")[0]
    whole = f"{end.kind}: {first}" if end.kind and first else end.kind or first
    return whole if len(whole) <= MESSAGE_LIMIT else whole[: MESSAGE_LIMIT - 1] + "…"


def to_mib(figure: str, unit: str) -> int:
    """Rounded up: the next booking must hold it."""
    return -int(-float(figure.replace(",", "")) * _BYTES[unit] // 2**20)


def asked_mib(message: str) -> int | None:
    if match := _ASKED.search(message):
        return to_mib(match[1], match[2])
    if (match := _TENSOR.search(message)) and match[2] in _TENSOR_BYTES:
        count = 1
        for size in match[1].split(","):
            count *= int(size or 1)
        return -(-count * _TENSOR_BYTES[match[2]] // 2**20)
    return None


def peak_mib(message: str) -> int | None:
    """The process's footprint, if the message gives it. In some containers PyTorch prints an impossible figure (more
    than the card has), which counts as missing."""
    match = _HELD.search(message)
    if match is None:
        return None
    held = to_mib(match[1], match[2])
    capacity = _CAPACITY.search(message)
    return None if capacity and held > to_mib(capacity[1], capacity[2]) else held

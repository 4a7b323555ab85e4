"""Holds a task to its cap by its framework's own limit, set through the environment before it starts.

Such a limit binds one allocator in one process, and the process can lift it. Two processes of a task on one GPU have
one each, and the memory of CUDA and its libraries comes on top (`context_mib`, subtracted first). It makes an honest
task fail early and with the usual error of its framework; it does not hold a task that evades it.

PyTorch: `per_process_memory_fraction` came with pull request 161035 and is in the notes of 2.10. Earlier releases
refuse an unknown option, and the program ends. The limit is the fraction times the device's totalGlobalMem, checked
before each new segment (c10/cuda/CUDACachingAllocator.cpp). Which variable: the CUDA allocator of 2.13 reads
PYTORCH_CUDA_ALLOC_CONF, and PYTORCH_ALLOC_CONF only without it (c10/cuda/CUDAAllocatorConfig.h). The part common to all
devices reads them in the opposite order and, up to 2.11, warns if the first one is set alone
(c10/core/AllocatorConfig.cpp). So both are set to the same value.
JAX: takes 75 % of a card at once by default. Both spellings of its fraction together are an error, after which it runs
on the CPU (jaxlib, xla_client.py). The fraction bounds the default allocator, with or without preallocation.
CuPy: CUPY_GPU_MEMORY_LIMIT in bytes or per cent, 0 for none, for each device (cupy/cuda/memory.pyx).
TensorFlow: no variable limits it; growth on demand is all that can be set.
Under MPS's memory limit the driver shows less *free* memory and the whole card as its total, so a fraction has the same
meaning. Under a limit of its cgroup the total is the limit, so no fraction may be given (attempt_cgroups.py).
"""

from __future__ import annotations

import math
import re

from msgspec.structs import replace

from carma.core.model.values import Frameworks, Gpu, Guard, Record
from carma.core.ports import LaunchOrder

TORCH_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
JAX_FRACTIONS = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")  # the first is known to all versions
JAX_DEFAULT = 0.75
JAX_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
TENSORFLOW_GROWTH = "TF_FORCE_GPU_ALLOW_GROWTH"
CUPY_LIMIT = "CUPY_GPU_MEMORY_LIMIT"

FRACTION = "per_process_memory_fraction"
_FIRST = (2, 10)  # the release that added it; pre-releases of 2.10 may be older than the option

_VERSION = re.compile(r"(\d+)\.(\d+)(?P<rest>.*)")
_PRERELEASE = re.compile(r"[0-9.]*(a|b|rc|\.dev)\d")

MIB = 2**20
_EQUAL_SIZE_RELATIVE = 0.02  # GPUs whose memory differs by less count as equal: one fraction serves them all


class Capped(Record, frozen=True, kw_only=True):
    """The variables to set, the guards that certainly hold, and a note about missing ones."""

    environment: dict[str, str] = {}
    guards: tuple[Guard, ...] = ()
    note: str = ""


def framework_caps(order: LaunchOrder, cap_mib: int, context_mib: int) -> Capped:
    """The limits for an attempt that may use `cap_mib` on each of its GPUs. `context_mib` of it are outside the
    framework's allocator. The files of the command are not read here: the daemon may be root."""
    if not order.gpus:
        return Capped()
    own, found = order.spec.environment, order.frameworks
    share = Share.of(order.gpus, cap_mib, context_mib)
    if found.problem:
        parts = [Capped(note=f"its framework is not limited: {found.problem}")]
    elif share is None:
        note = f"{cap_mib} MiB is not more than a bare process needs, so its framework is not limited"
        parts = [Capped(note=note)]
    else:
        parts = [_torch(own, found, share), _jax(own, found, share), _tensorflow(found), _cupy(own, found, share)]
        if not any(found.versions(name) for name in ("torch", "jax", "tensorflow", "cupy")):
            parts.append(Capped(note="no framework with a memory limit was found for its command"))
    environment = without_hoarding(own)
    for part in parts:
        environment |= part.environment
    guards = tuple(guard for part in parts for guard in part.guards)
    return Capped(environment=environment, guards=guards, note="; ".join(part.note for part in parts if part.note))


class Share(Record, frozen=True, kw_only=True):
    """The cap in the units of frameworks: the size of their allocator in MiB and as a fraction of the device.

    A fraction is one number for all GPUs of a task. If these differ in size, it is that of the smallest, so that no GPU
    stops the task below its booking. On the larger ones it then allows more, and no guard is listed.
    """

    room_mib: int
    total_mib: int  # of the smallest
    context_mib: int
    uniform: bool

    @classmethod
    def of(cls, gpus: tuple[Gpu, ...], cap_mib: int, context_mib: int) -> Share | None:
        smallest, largest = min(gpu.memory_mib for gpu in gpus), max(gpu.memory_mib for gpu in gpus)
        room_mib = min(cap_mib - context_mib, smallest)
        if room_mib <= 0 or smallest <= 0:
            return None
        # Of sizes that count as equal the largest is used, so that it keeps within the cap too.
        uniform = largest <= smallest * (1 + _EQUAL_SIZE_RELATIVE)
        total_mib = largest if uniform else smallest
        return cls(room_mib=room_mib, total_mib=total_mib, context_mib=context_mib, uniform=uniform)

    @property
    def fraction(self) -> float:
        """Rounded down to six digits: 0.14 MiB on the largest cards of today."""
        return math.floor(self.room_mib / self.total_mib * 1e6) / 1e6

    def guard(self, how: str, fraction: float | None = None) -> Guard:
        """`fraction`: the submitter's own, if it is stricter."""
        room_mib = self.room_mib if fraction is None else min(self.room_mib, math.ceil(fraction * self.total_mib))
        return Guard(rung="framework", limit_mib=room_mib + self.context_mib, how=how)


def without_hoarding(own: dict[str, str]) -> dict[str, str]:
    """JAX and TensorFlow take most of a card at once by default: no GPU could be shared, and the memory that the task
    needs could not be measured. A setting of JAX by the submitter stays; TensorFlow's "false" would take the card."""
    jax = {} if own.get(JAX_PREALLOCATE) else {JAX_PREALLOCATE: "false"}
    return {**jax, TENSORFLOW_GROWTH: "true"}


def _torch(own: dict[str, str], found: Frameworks, share: Share) -> Capped:
    versions = found.versions("torch")
    if not versions or all("+cpu" in version for version in versions):
        return Capped()
    named = _named("PyTorch", versions)
    if not all(has_fraction(version) for version in versions):
        return Capped(note=f"{named} has no memory limit that the environment sets (2.10 and newer have one)")
    if own.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return Capped(note=f"{named} runs without its allocator (PYTORCH_NO_CUDA_MEMORY_CACHING), so it has no limit")
    if note := _set_by_command(found, TORCH_VARIABLES):
        return Capped(note=note)
    first, second = (own.get(name, "") for name in TORCH_VARIABLES)
    options = dict(zip(TORCH_VARIABLES, (first or second, second or first), strict=True))
    if any(torch_option(text, "backend") not in (None, "native") for text in options.values()):
        return Capped(note=f"{named} uses an allocator chosen by its user, which has no limit")
    theirs = _torch_fraction(first or second)  # of the variable that the allocator reads first
    environment = {name: with_fraction(text, share.fraction) for name, text in options.items()}
    return _claimed(found, share, environment, named, theirs)


def _jax(own: dict[str, str], found: Frameworks, share: Share) -> Capped:
    versions = found.versions("jax")
    if note := _set_by_command(found, JAX_FRACTIONS):
        return Capped(note=note if versions else "")
    spelled = [name for name in JAX_FRACTIONS if own.get(name)]
    if len(spelled) > 1:
        return Capped(note="both spellings of JAX's memory fraction are set, so CARMA sets none" if versions else "")
    name = spelled[0] if spelled else JAX_FRACTIONS[0]
    theirs = _number(own.get(name, ""))
    limit = theirs if theirs is not None and theirs > 0 else JAX_DEFAULT
    stricter = limit <= share.fraction
    environment = {} if stricter else {name: f"{share.fraction:.6f}"}
    if not versions:
        return Capped(environment=environment)
    if own.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower() not in ("", "default", "bfc"):
        return Capped(environment=environment, note="JAX uses an allocator chosen by its user, which has no limit")
    if own.get("TF_FORCE_UNIFIED_MEMORY"):
        return Capped(environment=environment, note="JAX uses unified memory, which its fraction does not bound")
    return _claimed(found, share, environment, _named("JAX", versions), limit if stricter else None)


def _tensorflow(found: Frameworks) -> Capped:
    if not found.versions("tensorflow"):
        return Capped()
    return Capped(note="TensorFlow has no memory limit that the environment sets; it allocates on demand")


def _cupy(own: dict[str, str], found: Frameworks, share: Share) -> Capped:
    versions = found.versions("cupy")
    if note := _set_by_command(found, (CUPY_LIMIT,)):
        return Capped(note=note if versions else "")
    theirs = own.get(CUPY_LIMIT, "").strip()
    their_mib = _cupy_mib(theirs, share.total_mib)
    stricter = their_mib is not None and 0 < their_mib <= share.room_mib
    environment = {} if stricter else {CUPY_LIMIT: str(share.room_mib * MIB)}
    if not versions:
        return Capped(environment=environment)
    fraction = their_mib / share.total_mib if stricter and their_mib is not None else None
    # A limit in bytes is the same on each GPU, whatever its size.
    return _claimed(found, replace(share, uniform=True), environment, _named("CuPy", versions), fraction)


def _cupy_mib(text: str, total_mib: int) -> float | None:
    if text.endswith("%"):
        percent = _number(text[:-1])
        return None if percent is None else percent / 100 * total_mib
    return int(text) / MIB if re.fullmatch(r"[0-9]+", text) else None


def _claimed(found: Frameworks, share: Share, environment: dict[str, str], named: str, theirs: float | None) -> Capped:
    """The limit, with a guard if it certainly holds."""
    if not share.uniform:
        return Capped(environment=environment, note=f"its GPUs differ in size, so a fraction does not bound {named}")
    if not found.certain:
        note = f"it is unknown which Python runs, so a limit of {named} is not certain"
        return Capped(environment=environment, note=note)
    return Capped(environment=environment, guards=(share.guard(f"{named}, each process", theirs),))


def _set_by_command(found: Frameworks, names: tuple[str, ...]) -> str:
    """A sentence if the command line sets one of them itself (`env A=b python`), or keeps ours out (`env -i`). Then the
    variables are not set, because two settings of one option may be an error."""
    theirs = [name for name in names if not found.reaches(name)]
    return f"its command line controls {' and '.join(theirs)}" if theirs else ""


def _named(framework: str, versions: tuple[str, ...]) -> str:
    return f"{framework} {' or '.join(version or 'of unknown version' for version in versions)}"


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


# PyTorch's allocator options (`a:1,b:[64:8,>:1]`), split as its own tokeniser does, with a memory limit added. The
# submitter's options stay as they are, character by character; only a memory fraction is replaced by a smaller one.
# Options that cannot be read stay too: PyTorch refuses them with its usual message.


def has_fraction(version: str) -> bool:
    """Whether this PyTorch knows the option. False for an unknown version: PyTorch ends on an unknown option."""
    match = _VERSION.match(version)
    if match is None:
        return False
    release = (int(match[1]), int(match[2]))
    return release > _FIRST or (release == _FIRST and not _PRERELEASE.match(match["rest"]))


def torch_option(text: str, key: str) -> str | None:
    """The last value of the option."""
    values = [item.partition(":")[2].strip() for item in _split(text) if item.partition(":")[0].strip() == key]
    return values[-1] if values else None


def _torch_fraction(text: str) -> float | None:
    number = _number(torch_option(text, FRACTION) or "")
    return number if number is not None and 0 <= number <= 1 else None


def with_fraction(text: str, fraction: float) -> str:
    """The options with at most this memory fraction."""
    theirs = _torch_fraction(text)
    if theirs is not None and theirs <= fraction:
        return ",".join(_split(text))
    rest = [item for item in _split(text) if item.partition(":")[0].strip() != FRACTION]
    return ",".join((*rest, f"{FRACTION}:{fraction:.6f}"))


def _split(text: str) -> list[str]:
    """Split at commas that are not inside brackets."""
    items, depth = [""], 0
    for character in text:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "," and depth <= 0:
            items.append("")
        else:
            items[-1] += character
    return [item for item in items if item.strip()]

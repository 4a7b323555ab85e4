"""The settings of PyTorch's CUDA allocator, read from the task's environment as torch reads them.

torch ends a program whose settings it cannot read. Here such a setting keeps its default and causes a warning, because
the torch version of the task may know keys that this module does not.
"""

from __future__ import annotations

from collections.abc import Mapping

from carma.core.model.values import Record

MIB = 1 << 20
# Since torch 2.9 the first name takes precedence; the older ones are read if it is absent.
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
SIZE_CLASSES = 16  # of roundup_power2_divisions: 1 MiB, 2 MiB, ... 32 GiB and more
_DEFAULT_SEGMENT_MIB, _SMALLEST_SEGMENT_MIB = 20, 11
_FIELDS = {
    "expandable_segments": "expandable_segments",
    "large_segment_size_mb": "large_segment_bytes",
    "max_split_size_mb": "max_split_bytes",
    "max_non_split_rounding_mb": "max_non_split_rounding_bytes",
    "roundup_power2_divisions": "roundup_power2_divisions",
    "garbage_collection_threshold": "garbage_collection_threshold",
    "per_process_memory_fraction": "memory_fraction",
}
# Keys that torch knows and that do not move a block of device memory: host memory, locks, graph capture.
_WITHOUT_EFFECT = frozenset((
    "graph_capture_record_stream_reuse", "pinned_free_catch_all", "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb", "pinned_num_register_threads", "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads", "pinned_use_cuda_host_register", "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "throw_on_cudamalloc_oom",
))  # fmt: skip


class AllocatorOptions(Record, frozen=True, kw_only=True):
    """Settings of the allocator's model. The defaults are torch's."""

    expandable_segments: bool = False
    large_segment_bytes: int = _DEFAULT_SEGMENT_MIB * MIB
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = _DEFAULT_SEGMENT_MIB * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * SIZE_CLASSES
    garbage_collection_threshold: float = 0.0
    memory_fraction: float = 1.0
    warnings: tuple[str, ...] = ()
    not_modelled: str = ""  # why the model would give a wrong number; "" if it would not


class _Unreadable(Exception):
    """torch would refuse the value; the text says why."""


def from_environment(environment: Mapping[str, str]) -> AllocatorOptions:
    text = next((environment[name] for name in NAMES if environment.get(name)), "")
    # Older torch takes any value of this variable for a yes, newer ones only "1"; "0" is the only usual way to say no.
    return parse(text, caching=environment.get(NO_CACHING, "") in ("", "0"))


def parse(text: str, *, caching: bool = True) -> AllocatorOptions:
    """`text` is the value of the environment variable, such as `expandable_segments:True,max_split_size_mb:128`."""
    values: dict[str, object] = {}
    warnings: list[str] = []
    not_modelled = "" if caching else f"{NO_CACHING} turns the caching allocator off, which is not modelled"
    segment_mib = _DEFAULT_SEGMENT_MIB
    # large_segment_size_mb comes first, wherever it stands: the least values of two others depend on it.
    for key, value in sorted(_pairs(text), key=lambda pair: pair[0] != "large_segment_size_mb"):
        if key == "backend" and value in ("cudaMallocAsync", "hipMallocAsync"):
            not_modelled = not_modelled or f"backend:{value} uses the driver's own memory pool, which is not modelled"
        elif key in _FIELDS:
            try:
                values[_FIELDS[key]] = found = _read(key, value, segment_mib)
            except _Unreadable as why:
                warnings.append(f"the allocator's setting {key}:{value} is ignored: {why}")
                continue
            if key == "large_segment_size_mb" and isinstance(found, int):
                segment_mib = found // MIB
        elif (key, value) != ("backend", "native") and key not in _WITHOUT_EFFECT:
            name = f"{key}:{value}" if key == "backend" else repr(key)
            warnings.append(f"the allocator's setting {name} is unknown and ignored")
    values.setdefault("max_non_split_rounding_bytes", segment_mib * MIB)
    return AllocatorOptions(**values, warnings=tuple(warnings), not_modelled=not_modelled)  # type: ignore[arg-type]


def _pairs(text: str) -> list[tuple[str, str]]:
    """Splits at commas outside of brackets, then at the first colon; white space is ignored, as in torch."""
    depth, parts = 0, [""]
    for letter in "".join(text.split()):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [(key, value) for key, _, value in (part.partition(":") for part in parts if part)]


def _read(key: str, value: str, segment_mib: int) -> object:
    match key:
        case "expandable_segments":
            if value not in ("True", "False"):
                raise _Unreadable("True or False is expected")
            return value == "True"
        case "roundup_power2_divisions":
            return _divisions(value)
        case "garbage_collection_threshold" | "per_process_memory_fraction":
            return _share(value, may_be_bound=key == "per_process_memory_fraction")
    least = _SMALLEST_SEGMENT_MIB if key == "large_segment_size_mb" else segment_mib
    if (found := _number(value)) < least:
        raise _Unreadable(f"it must be {least} or more")
    return found * MIB


def _number(value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise _Unreadable("a whole number is expected")
    return int(value)


def _share(value: str, *, may_be_bound: bool) -> float:
    try:
        found = float(value)
    except ValueError:
        raise _Unreadable("a number is expected") from None
    if not (0 < found < 1 or (may_be_bound and found in (0, 1))):
        raise _Unreadable("it must lie between 0 and 1")
    return found


def _power_of_two(value: str) -> int:
    found = _number(value)
    if found == 0 or found & (found - 1):
        raise _Unreadable("powers of two are expected")
    return found


def _divisions(value: str) -> tuple[int, ...]:
    """One number for all sizes, or a list by size in MiB. Sizes that the list skips are not rounded, as in torch."""
    if not value.startswith("["):
        return (_power_of_two(value),) * SIZE_CLASSES
    if not value.endswith("]"):
        raise _Unreadable("the list is not closed")
    found, last = [0] * SIZE_CLASSES, -1
    for part in filter(None, value[1:-1].split(",")):
        size, _colon, number = part.partition(":")
        steps = 0 if number == "0" else _power_of_two(number)
        if size == ">":
            first, last = max(last, 0) + 1, SIZE_CLASSES - 1
        else:
            # The first size of a list stands for all smaller ones too.
            index = min(_power_of_two(size).bit_length(), SIZE_CLASSES) - 1
            first, last = (0 if last < 0 else index), index
        found[first : last + 1] = [steps] * (last + 1 - first)
    return tuple(found)

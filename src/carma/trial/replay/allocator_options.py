"""The settings of PyTorch's CUDA allocator, read from the environment of the script as torch reads them.

torch stops a program whose settings it cannot read. Here such a setting is left at its default and said in a warning,
because the torch that will run the script may know keys that this file does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from carma.core.model.values import Record

MIB = 1 << 20
# torch 2.9 made the first name the one that counts; the older ones are still read where it is absent.
NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
NO_CACHING = "PYTORCH_NO_CUDA_MEMORY_CACHING"
SIZE_CLASSES = 16  # of roundup_power2_divisions: 1 MiB, 2 MiB, ... 32 GiB and more
_SMALLEST_LARGE_SEGMENT_MIB = 10

# Keys that torch knows and that move no block of device memory: host memory, locks, graph capture.
_WITHOUT_EFFECT = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "throw_on_cudamalloc_oom",
    }
)


class AllocatorOptions(Record, frozen=True, kw_only=True):
    """What the model of the allocator needs to know. The defaults are torch's."""

    expandable_segments: bool = False
    large_segment_bytes: int = 20 * MIB
    max_split_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * SIZE_CLASSES
    garbage_collection_threshold: float = 0.0
    memory_fraction: float = 1.0
    warnings: tuple[str, ...] = ()
    not_modelled: str = ""  # why the model would give a wrong number; "" where it would not


class _Unreadable(Exception):
    """A value that torch would refuse; the text says why."""


def from_environment(environment: Mapping[str, str]) -> AllocatorOptions:
    text = next((environment[name] for name in NAMES if environment.get(name)), "")
    # Older torch takes any value of this variable for a yes, newer ones only "1"; nobody sets it to mean no but by 0.
    return parse(text, caching=environment.get(NO_CACHING, "") in ("", "0"))


def parse(text: str, *, caching: bool = True) -> AllocatorOptions:
    """`text` is what the environment variable holds, such as `expandable_segments:True,max_split_size_mb:128`."""
    values: dict[str, int | float | bool | tuple[int, ...]] = {}
    warnings: list[str] = []
    not_modelled = "" if caching else f"{NO_CACHING} turns the caching allocator off, which is not modelled"
    # large_segment_size_mb comes first, wherever it stands: the smallest values of two others hang on it.
    for key, value in sorted(_pairs(text), key=lambda pair: pair[0] != "large_segment_size_mb"):
        if key == "backend":
            not_modelled = not_modelled or _backend(value, warnings)
        elif key in _READERS:
            name, read = _READERS[key]
            try:
                values[name] = read(value, values)
            except _Unreadable as why:
                warnings.append(f"the allocator's setting {key}:{value} is left out: {why}")
        elif key not in _WITHOUT_EFFECT:
            warnings.append(f"the allocator's setting {key!r} is not known and is left out")
    values.setdefault("max_non_split_rounding_bytes", _large_segment(values))
    return AllocatorOptions(**values, warnings=tuple(warnings), not_modelled=not_modelled)  # type: ignore[arg-type]


def _pairs(text: str) -> list[tuple[str, str]]:
    """Cuts at commas outside of brackets, then at the first colon; white space does not count, as in torch."""
    depth, parts = 0, [""]
    for letter in "".join(text.split()):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    cut = (part.partition(":") for part in parts if part)
    return [(key, value) for key, _, value in cut]


def _backend(value: str, warnings: list[str]) -> str:
    if value in ("cudaMallocAsync", "hipMallocAsync"):
        return f"backend:{value} hands memory to the driver's own pool, which is not modelled"
    if value != "native":
        warnings.append(f"the allocator's setting backend:{value} is not known and is left out")
    return ""


_Values = Mapping[str, "int | float | bool | tuple[int, ...]"]


def _large_segment(values: _Values) -> int:
    found = values.get("large_segment_bytes", 20 * MIB)
    assert isinstance(found, int)
    return found


def _number(value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise _Unreadable("a whole number is expected")
    return int(value)


def _yes_or_no(value: str, _: _Values) -> bool:
    if value not in ("True", "False"):
        raise _Unreadable("True or False is expected")
    return value == "True"


def _read_large_segment(value: str, _: _Values) -> int:
    if (mib := _number(value)) <= _SMALLEST_LARGE_SEGMENT_MIB:
        raise _Unreadable(f"it must be more than {_SMALLEST_LARGE_SEGMENT_MIB}")
    return mib * MIB


def _not_below_a_segment(value: str, values: _Values) -> int:
    found = _number(value) * MIB
    if found < (least := _large_segment(values)):
        raise _Unreadable(f"it must be {least // MIB} or more")
    return found


def _share(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise _Unreadable("a number is expected") from None


def _threshold(value: str, _: _Values) -> float:
    if not 0 < (found := _share(value)) < 1:
        raise _Unreadable("it must lie between 0 and 1")
    return found


def _fraction(value: str, _: _Values) -> float:
    if not 0 <= (found := _share(value)) <= 1:
        raise _Unreadable("it must lie between 0 and 1")
    return found


def _power_of_two(value: str) -> int:
    found = _number(value)
    if found == 0 or found & (found - 1):
        raise _Unreadable("powers of two are expected")
    return found


def _divisions(value: str, _: _Values) -> tuple[int, ...]:
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
            # The first size of a list stands for all below it too.
            index = min(_power_of_two(size).bit_length(), SIZE_CLASSES) - 1
            first, last = (0 if last < 0 else index), index
        found[first : last + 1] = [steps] * (last + 1 - first)
    return tuple(found)


_Reader = Callable[[str, _Values], "int | float | bool | tuple[int, ...]"]
_READERS: dict[str, tuple[str, _Reader]] = {
    "expandable_segments": ("expandable_segments", _yes_or_no),
    "large_segment_size_mb": ("large_segment_bytes", _read_large_segment),
    "max_split_size_mb": ("max_split_bytes", _not_below_a_segment),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _not_below_a_segment),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "per_process_memory_fraction": ("memory_fraction", _fraction),
}

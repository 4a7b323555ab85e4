"""The allocator's settings, as torch reads them from the environment."""

from __future__ import annotations

import pytest

from carma.trial.replay.allocator_options import MIB, AllocatorOptions, from_environment, parse


def test_nothing_set_means_torchs_defaults() -> None:
    assert parse("") == AllocatorOptions()
    assert from_environment({"PATH": "/bin"}) == AllocatorOptions()


def test_every_setting_that_moves_memory_is_read() -> None:
    found = parse(
        "max_split_size_mb:128, garbage_collection_threshold:0.6, expandable_segments:True,"
        "roundup_power2_divisions:8,max_non_split_rounding_mb:64,large_segment_size_mb:32,per_process_memory_fraction:0.25"
    )
    assert found == AllocatorOptions(
        expandable_segments=True,
        large_segment_bytes=32 * MIB,
        max_split_bytes=128 * MIB,
        max_non_split_rounding_bytes=64 * MIB,
        roundup_power2_divisions=(8,) * 16,
        garbage_collection_threshold=0.6,
        memory_fraction=0.25,
    )


def test_the_rounding_of_oversize_blocks_follows_the_large_segment() -> None:
    assert parse("large_segment_size_mb:32").max_non_split_rounding_bytes == 32 * MIB


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[256:1,512:2,>:4]", (1,) * 9 + (2,) + (4,) * 6),
        ("[64:8,256:4,1024:4,>:1]", (8,) * 7 + (0, 4, 0, 4) + (1,) * 5),  # sizes between two of the list: not rounded
        ("[1:2]", (2,) + (0,) * 15),
        ("[>:4]", (0,) + (4,) * 15),
        ("[262144:2]", (2,) * 16),
        ("[512:0,>:8]", (0,) * 10 + (8,) * 6),
        ("[]", (0,) * 16),
    ],
)
def test_divisions_by_size(text: str, expected: tuple[int, ...]) -> None:
    found = parse(f"roundup_power2_divisions:{text},expandable_segments:True")
    assert found.roundup_power2_divisions == expected
    assert found.expandable_segments
    assert found.warnings == ()


@pytest.mark.parametrize(
    "setting",
    [
        "max_split_size_mb:19",
        "max_split_size_mb:lots",
        "max_split_size_mb",
        "large_segment_size_mb:10",
        "max_non_split_rounding_mb:1",
        "expandable_segments:true",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:0",
        "roundup_power2_divisions:[256:1,512:2",
        "roundup_power2_divisions:[300:2]",
        "garbage_collection_threshold:1.0",
        "garbage_collection_threshold:soon",
        "per_process_memory_fraction:1.5",
    ],
)
def test_a_value_that_torch_refuses_is_left_out_with_a_warning(setting: str) -> None:
    found = parse(setting)
    assert len(found.warnings) == 1
    assert setting.partition(":")[0] in found.warnings[0]
    assert found == AllocatorOptions(warnings=found.warnings)


def test_a_small_split_size_is_refused_beside_a_larger_segment_wherever_it_stands() -> None:
    found = parse("max_split_size_mb:32,large_segment_size_mb:64")
    assert found.max_split_bytes is None
    assert "64 or more" in found.warnings[0]


def test_unknown_settings_are_named_and_the_others_count() -> None:
    found = parse("colour:blue,max_split_size_mb:64")
    assert found.max_split_bytes == 64 * MIB
    (warning,) = found.warnings
    assert "'colour'" in warning


def test_settings_of_host_memory_and_locks_are_no_concern() -> None:
    text = "pinned_use_background_threads:True,pinned_num_register_threads:8,release_lock_on_cudamalloc:True"
    assert parse(text) == AllocatorOptions()


def test_the_new_name_of_the_variable_goes_before_the_old_one() -> None:
    both = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert from_environment(both) == AllocatorOptions(expandable_segments=True)
    assert from_environment({**both, "PYTORCH_ALLOC_CONF": ""}) == AllocatorOptions(max_split_bytes=64 * MIB)


def test_other_ways_to_get_memory_are_not_modelled_and_say_so() -> None:
    assert "cudaMallocAsync" in parse("backend:cudaMallocAsync,expandable_segments:True").not_modelled
    assert parse("backend:native").not_modelled == ""
    assert parse("backend:other").warnings
    assert "PYTORCH_NO_CUDA_MEMORY_CACHING" in from_environment({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}).not_modelled
    assert from_environment({"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}).not_modelled == ""

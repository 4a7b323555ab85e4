"""Limits of frameworks: the variables that are set, those that stay the submitter's, and the guards that are listed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from carma.core.model.values import NO_FRAMEWORKS, Frameworks, Gpu, GpuId
from carma.core.ports import LaunchOrder
from carma.launch.frameworks import find
from carma.launch.memory_caps import Capped, framework_caps, has_fraction, torch_option, with_fraction
from carma.testing.launcher_contract import order_of
from tests.golden_text import assert_wording
from tests.launch_orders import spec_of

FRACTION = "per_process_memory_fraction"
CUDA, ANY = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
OLD, NEW = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"


def site(home: Path, **versions: str) -> Path:
    """A virtual environment with these frameworks. Returns its Python."""
    python = home / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    (home / "pyvenv.cfg").write_text("home = /usr/bin\n")
    for name, version in versions.items():
        packages = home / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
        (packages / f"{name}-{version}.dist-info").mkdir(parents=True)
    return python


def ordered(
    *command: str | Path, sizes: tuple[int, ...] = (100_000,), own: dict[str, str] | None = None
) -> LaunchOrder:
    gpus = tuple(
        Gpu(id=GpuId(f"GPU-{place}"), index=place, name="H", memory_mib=mib) for place, mib in enumerate(sizes)
    )
    spec = spec_of(*(str(word) for word in command), environment={"PATH": "/nowhere", **(own or {})})
    order = order_of(spec, gpus=tuple(gpu.id for gpu in gpus))
    return replace(order, gpus=gpus, frameworks=find(spec.command, spec.environment, spec.directory))


def capped(
    home: Path,
    cap_mib: int = 20_800,
    sizes: tuple[int, ...] = (100_000,),
    own: dict[str, str] | None = None,
    **has: str,
) -> Capped:
    return framework_caps(ordered(site(home, **has), "train.py", sizes=sizes, own=own), cap_mib, 800)


def test_pytorch_gets_its_share_of_the_card_less_the_context(tmp_path: Path) -> None:
    result = capped(tmp_path, torch="2.11.0+cu130")
    assert result.environment[CUDA] == result.environment[ANY] == f"{FRACTION}:0.200000"
    (guard,) = result.guards
    assert (guard.rung, guard.limit_mib) == ("framework", 20_800)
    assert "PyTorch 2.11.0+cu130" in guard.how
    assert "process" in guard.how


def test_the_fraction_is_rounded_down(tmp_path: Path) -> None:
    result = capped(tmp_path, 4_096, sizes=(143_771,), torch="2.10.0")
    fraction = float(result.environment[CUDA].partition(":")[2])
    assert fraction * 143_771 <= 4_096 - 800
    assert fraction * 143_771 > 4_096 - 800 - 1


@pytest.mark.parametrize("version", ["2.9.1", "1.13.1", "2.10.0a0+git1234", "2.10.0.dev20250910", "2.10.0rc1"])
def test_a_pytorch_that_may_not_know_the_option_is_not_given_it(tmp_path: Path, version: str) -> None:
    result = capped(tmp_path, torch=version)
    assert not {CUDA, ANY} & set(result.environment)
    assert result.guards == ()
    assert result.note


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("2.10.0", True),
        ("2.10.1+cu128", True),
        ("2.11.0a0+git1234", True),
        ("3.0.0", True),
        ("2.9.1+cu130", False),
        ("2.10.0a0+b4e4ee81d3.nv25.12", False),
        ("", False),
        ("unknown", False),
        ("2", False),
    ],
)
def test_which_pytorch_knows_the_option(version: str, known: bool) -> None:
    assert has_fraction(version) is known


def test_a_pytorch_without_cuda_is_left_alone(tmp_path: Path) -> None:
    result = capped(tmp_path, torch="2.13.0+cpu")
    assert not {CUDA, ANY} & set(result.environment)
    assert result.guards == ()


def test_the_submitters_own_options_stay(tmp_path: Path) -> None:
    own = {CUDA: "expandable_segments:True,roundup_power2_divisions:[256:1,512:2,>:8], max_split_size_mb:128,"}
    result = capped(tmp_path, torch="2.11.0", own=own)
    assert result.environment[CUDA] == own[CUDA].rstrip(",") + f",{FRACTION}:0.200000"
    assert result.environment[ANY] == result.environment[CUDA], "the two are read in turn: they must say the same"


def test_each_of_the_two_variables_keeps_its_options(tmp_path: Path) -> None:
    result = capped(tmp_path, torch="2.11.0", own={CUDA: "backend:native", ANY: "expandable_segments:True"})
    assert result.environment[CUDA] == f"backend:native,{FRACTION}:0.200000"
    assert result.environment[ANY] == f"expandable_segments:True,{FRACTION}:0.200000"


@pytest.mark.parametrize(("theirs", "counts", "limit_mib"), [("0.1", "0.1", 10_800), ("0.9", "0.200000", 20_800)])
def test_the_smaller_fraction_counts(tmp_path: Path, theirs: str, counts: str, limit_mib: int) -> None:
    result = capped(tmp_path, torch="2.11.0", own={ANY: f"{FRACTION}:{theirs},expandable_segments:True"})
    assert torch_option(result.environment[CUDA], FRACTION) == counts
    assert torch_option(result.environment[CUDA], "expandable_segments") == "True"
    assert result.environment[CUDA].count(FRACTION) == 1
    assert [guard.limit_mib for guard in result.guards] == [limit_mib]


@pytest.mark.parametrize("text", ["", ",", "nonsense", "a:[1,2", f"{FRACTION}:much", f"{FRACTION}:nan", "a:1,,b:2"])
def test_options_that_cannot_be_read_are_followed_by_the_limit(text: str) -> None:
    assert with_fraction(text, 0.25).endswith(f"{FRACTION}:0.250000")


@pytest.mark.parametrize("own", [{CUDA: "backend:cudaMallocAsync"}, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}])
def test_an_allocator_without_a_limit_has_no_guard(tmp_path: Path, own: dict[str, str]) -> None:
    result = capped(tmp_path, torch="2.11.0", own=own)
    assert result.guards == ()
    assert CUDA not in result.environment
    assert result.note


def test_variables_of_the_command_line_are_not_set_and_give_no_guard(tmp_path: Path) -> None:
    python = site(tmp_path, torch="2.11.0", jax="0.11.2", cupy="14.2.0")
    order = ordered("env", f"{ANY}=expandable_segments:True", f"{NEW}=0.9", "CUPY_GPU_MEMORY_LIMIT=0", python)
    result = framework_caps(order, 20_800, 800)
    assert not {CUDA, ANY, OLD, NEW, "CUPY_GPU_MEMORY_LIMIT"} & set(result.environment)
    assert result.guards == ()
    assert result.note


def test_uncertain_interpreters_are_limited_if_all_versions_allow_it_and_are_no_guard(tmp_path: Path) -> None:
    site(tmp_path / "a", torch="2.11.0")
    site(tmp_path / "b", torch="2.10.0")
    own = {"VIRTUAL_ENV": str(tmp_path / "a"), "CONDA_PREFIX": str(tmp_path / "b")}
    agreed = framework_caps(ordered("/bin/sh", "run.sh", own=own), 20_800, 800)
    assert FRACTION in agreed.environment[CUDA]
    assert agreed.guards == ()
    assert agreed.note
    site(tmp_path / "c", torch="2.4.0")
    at_odds = framework_caps(ordered("/bin/sh", "run.sh", own=own | {"PATH": str(tmp_path / "c/bin")}), 20_800, 800)
    assert CUDA not in at_odds.environment
    assert at_odds.note


def test_gpus_of_one_kind_are_held_by_the_largest(tmp_path: Path) -> None:
    result = capped(tmp_path, sizes=(100_000, 101_000), torch="2.11.0")
    fraction = float(result.environment[CUDA].partition(":")[2])
    assert fraction * 101_000 <= 20_000
    assert len(result.guards) == 1


def test_on_gpus_of_different_sizes_no_task_is_stopped_below_its_booking_and_only_limits_in_bytes_are_guards(
    tmp_path: Path,
) -> None:
    result = capped(tmp_path, sizes=(40_000, 80_000), torch="2.11.0", cupy="14.2.0")
    assert result.environment[CUDA] == f"{FRACTION}:0.500000"
    assert result.environment["CUPY_GPU_MEMORY_LIMIT"] == str(20_000 * 2**20)
    assert [guard.how.split()[0] for guard in result.guards] == ["CuPy"]
    assert result.note


def test_jax_is_kept_from_taking_three_quarters_of_the_card(tmp_path: Path) -> None:
    result = capped(tmp_path, jax="0.11.2")
    assert result.environment[OLD] == "0.200000"
    assert NEW not in result.environment, "both together are an error"
    assert result.environment["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    (guard,) = result.guards
    assert (guard.limit_mib, guard.how.split(",")[0]) == (20_800, "JAX 0.11.2")


@pytest.mark.parametrize("name", [OLD, NEW])
def test_jaxs_fraction_is_set_in_the_spelling_that_is_in_use(tmp_path: Path, name: str) -> None:
    (other,) = {OLD, NEW} - {name}
    larger = capped(tmp_path / "a", jax="0.11.2", own={name: "0.9", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"})
    assert larger.environment[name] == "0.200000"
    assert other not in larger.environment
    assert "XLA_PYTHON_CLIENT_PREALLOCATE" not in larger.environment
    smaller = capped(tmp_path / "b", jax="0.11.2", own={name: ".1"})
    assert not {OLD, NEW} & set(smaller.environment)
    assert [guard.limit_mib for guard in smaller.guards] == [10_800]


def test_the_fraction_of_jax_never_exceeds_its_default(tmp_path: Path) -> None:
    result = capped(tmp_path, 90_000, jax="0.11.2")
    assert not {OLD, NEW} & set(result.environment)
    assert [guard.limit_mib for guard in result.guards] == [75_800]


@pytest.mark.parametrize(
    "own",
    [{"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, {"TF_FORCE_UNIFIED_MEMORY": "1"}, {OLD: "0.1", NEW: "0.1"}],
)
def test_a_jax_that_its_fraction_does_not_bound_has_no_guard(tmp_path: Path, own: dict[str, str]) -> None:
    result = capped(tmp_path, jax="0.11.2", own=own)
    assert result.guards == ()
    assert result.note


def test_tensorflow_grows_on_demand_and_has_no_guard(tmp_path: Path) -> None:
    result = capped(tmp_path, tensorflow="2.20.0", own={"TF_FORCE_GPU_ALLOW_GROWTH": "false"})
    assert result.environment["TF_FORCE_GPU_ALLOW_GROWTH"] == "true"
    assert result.guards == ()
    assert result.note


@pytest.mark.parametrize(
    ("theirs", "stays", "limit_mib"),
    [
        (str(10_000 * 2**20), True, 10_800),
        ("10%", True, 10_800),
        ("50%", False, 20_800),
        ("0", False, 20_800),  # for CuPy: no limit
        ("22G", False, 20_800),
        (str(90_000 * 2**20), False, 20_800),
    ],
)
def test_cupys_stricter_limit_stays(tmp_path: Path, theirs: str, stays: bool, limit_mib: int) -> None:
    result = capped(tmp_path, cupy_cuda13x="14.2.0", own={"CUPY_GPU_MEMORY_LIMIT": theirs})
    assert ("CUPY_GPU_MEMORY_LIMIT" not in result.environment) is stays
    if not stays:
        assert result.environment["CUPY_GPU_MEMORY_LIMIT"] == str(20_000 * 2**20)
    assert [guard.limit_mib for guard in result.guards] == [limit_mib]


def test_each_installed_framework_is_listed(tmp_path: Path) -> None:
    result = capped(tmp_path, torch="2.11.0", jax="0.11.2", cupy="14.2.0", tensorflow="2.20.0")
    assert [guard.how.split()[0] for guard in result.guards] == ["PyTorch", "JAX", "CuPy"]
    assert result.note


def test_without_any_framework_only_harmless_variables_are_set_and_no_guard_is_listed(tmp_path: Path) -> None:
    result = capped(tmp_path)
    assert set(result.environment) == {
        OLD,
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        "TF_FORCE_GPU_ALLOW_GROWTH",
        "CUPY_GPU_MEMORY_LIMIT",
    }
    assert result.guards == ()
    assert result.note


def test_a_cap_below_the_context_sets_no_limit(tmp_path: Path) -> None:
    result = capped(tmp_path, 700, torch="2.11.0", jax="0.11.2")
    assert not {CUDA, ANY, OLD, NEW, "CUPY_GPU_MEMORY_LIMIT"} & set(result.environment)
    assert result.guards == ()
    assert result.note


def test_a_task_without_gpus_is_left_alone(tmp_path: Path) -> None:
    assert capped(tmp_path, sizes=(), torch="2.11.0") == Capped()


def test_a_cap_above_the_card_is_no_limit_at_all(tmp_path: Path) -> None:
    result = capped(tmp_path, 200_000, torch="2.11.0")
    assert result.environment[CUDA] == f"{FRACTION}:1.000000"


def test_the_launcher_does_not_read_the_files_of_a_command_itself(tmp_path: Path) -> None:
    """The daemon may be root: the files are read by a process of the task's owner."""
    order = ordered(site(tmp_path, torch="2.11.0"), "train.py")
    result = framework_caps(replace(order, frameworks=NO_FRAMEWORKS), 20_800, 800)
    assert not {CUDA, ANY} & set(result.environment)
    assert result.guards == ()
    assert result.note


def test_the_wording_of_the_notes_on_missing_limits(tmp_path: Path) -> None:
    python = site(tmp_path / "command", torch="2.11.0", jax="0.11.2")
    by_command = ordered("env", f"{ANY}=expandable_segments:True", f"{NEW}=0.9", python)
    guessed = ordered("/bin/sh", "run.sh", own={"VIRTUAL_ENV": str(tmp_path / "command")})
    unread = replace(guessed, frameworks=Frameworks(problem="its files did not answer within 5 s"))
    notes = {
        "old PyTorch": capped(tmp_path / "a", torch="2.4.0"),
        "PyTorch without its allocator": capped(
            tmp_path / "b", torch="2.11.0", own={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        ),
        "PyTorch with another allocator": capped(tmp_path / "c", torch="2.11.0", own={CUDA: "backend:cudaMallocAsync"}),
        "GPUs of different sizes": capped(tmp_path / "d", sizes=(40_000, 80_000), torch="2.11.0"),
        "JAX, both spellings": capped(tmp_path / "e", jax="0.11.2", own={OLD: "0.1", NEW: "0.1"}),
        "JAX with another allocator": capped(
            tmp_path / "f", jax="0.11.2", own={"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
        ),
        "JAX on unified memory": capped(tmp_path / "g", jax="0.11.2", own={"TF_FORCE_UNIFIED_MEMORY": "1"}),
        "TensorFlow": capped(tmp_path / "h", tensorflow="2.20.0"),
        "no framework": capped(tmp_path / "i"),
        "a cap below the context": capped(tmp_path / "j", 700, torch="2.11.0"),
        "set by the command line": framework_caps(by_command, 20_800, 800),
        "several interpreters": framework_caps(guessed, 20_800, 800),
        "files that cannot be read": framework_caps(unread, 20_800, 800),
    }
    assert_wording("memory_caps", {name: result.note for name, result in notes.items()})

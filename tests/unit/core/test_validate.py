"""What can never run is refused when it is submitted, with the largest GPU named."""

from __future__ import annotations

import pytest

from carma.core.model.settings import PlacementRules, Rules
from carma.core.model.values import TaskSpec
from carma.testing.builders import World


def spec(gpus: int = 1, mib: int | None = None) -> TaskSpec:
    return TaskSpec(command=("x",), directory="/", gpus=gpus, gpu_memory_mib=mib)


@pytest.mark.parametrize(
    ("sizes", "gpus", "mib", "told"),
    [
        ([24_576, 40_960], 1, 40_960, None),
        ([24_576, 40_960], 1, None, None),
        ([24_576, 40_960], 2, 24_576, None),
        (
            [24_576, 40_960],
            1,
            40_961,
            "it asks for 40,961 MiB of GPU memory; the largest GPU here is GPU 1 with 40,960 MiB",
        ),
        (
            [24_576, 40_960],
            1,
            102_400,
            "it asks for 100.0 GiB of GPU memory; the largest GPU here is GPU 1 with 40.0 GiB",
        ),
        (
            [24_576, 40_960],
            2,
            30_720,
            "it asks for 30.0 GiB of GPU memory; the largest GPU here is GPU 1 with 40.0 GiB, "
            "and 2 such GPUs are asked for",
        ),
        ([40_960, 40_960], 3, None, "it asks for 3 GPUs; this server has 2"),
    ],
)
def test_never_fits(sizes: list[int], gpus: int, mib: int | None, told: str | None) -> None:
    assert World(sizes).state.never_fits(spec(gpus, mib)) == told


def test_only_gpus_that_take_tasks_count() -> None:
    state = World([40_960, 81_920], rules=Rules(placement=PlacementRules(gpus=("GPU-0",)))).state
    assert [gpu.index for gpu in state.usable] == [0]
    assert state.never_fits(spec(1, 50_000)) == (
        "it asks for 48.8 GiB of GPU memory; the largest GPU here is GPU 0 with 40.0 GiB"
    )
    assert state.never_fits(spec(2)) == "it asks for 2 GPUs; this server has 1 that take tasks (placement.gpus)"


def test_a_drained_or_busy_gpu_still_counts() -> None:
    world = World(1)
    world.run(40_000)
    assert world.state.never_fits(spec(1, 40_960)) is None

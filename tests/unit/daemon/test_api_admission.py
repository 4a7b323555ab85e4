"""What is refused at submission, each with the error that names it; nothing of it reaches the log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from carma import errors
from carma.core.model.settings import Rules, Sharing
from carma.core.model.values import ArrayPlace, Dependency, GpuId, TaskId, TaskSpec, WarnSignal
from carma.core.policies import magm
from carma.core.state import State
from carma.daemon.api.submission_checks import STRING_BYTES, sharing_note
from carma.testing.builders import gpu
from carma.wire.api_types import ArrayAsk, SubmitRequest
from tests.golden_text import assert_wording
from tests.unit.daemon.api_server import Served, serving

NUL = "a\0b"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


REFUSED: list[tuple[dict[str, Any], type[errors.CarmaError]]] = [
    ({"command": ("",)}, errors.Usage),
    ({"command": ("true", NUL)}, errors.Usage),
    ({"name": NUL}, errors.Usage),
    ({"comment": NUL}, errors.Usage),
    ({"output": NUL}, errors.Usage),
    ({"environment": {"PATH": "/bin", "A": NUL}}, errors.Usage),
    ({"environment": {"A=B": "c"}}, errors.Usage),
    ({"environment": {"": "c"}}, errors.Usage),
    ({"name": "x" * 201}, errors.Usage),
    ({"name": "two\nlines"}, errors.Usage),
    ({"name": "\x1b[31m"}, errors.Usage),
    ({"comment": "x" * 2_001}, errors.TooLarge),
    ({"directory": "relative"}, errors.Usage),
    ({"directory": "/no/such/place"}, errors.NotRunnable),
    ({"directory": "/etc/passwd"}, errors.NotRunnable),
    ({"command": ("no-such-program-x",)}, errors.NotRunnable),
    ({"command": ("/no/such/program",)}, errors.NotRunnable),
    ({"command": ("./nothing",)}, errors.NotRunnable),
    ({"command": ("/etc",)}, errors.NotRunnable),
    ({"command": ("/etc/passwd",)}, errors.NotRunnable),
    ({"command": ("true; rm -rf /",)}, errors.NotRunnable),
    ({"command": ("python train.py",)}, errors.NotRunnable),
    ({"command": ("SEED=1", "python", "train.py")}, errors.NotRunnable),
    ({"command": ("cd", "/tmp")}, errors.NotRunnable),
    ({"command": (".",)}, errors.NotRunnable),
    ({"command": ("true", "x" * 200_000)}, errors.TooLarge),
    ({"command": ("true", *["x" * 100_000] * 11)}, errors.TooLarge),
    ({"environment": {f"A{number}": "x" * 100_000 for number in range(45)}}, errors.TooLarge),
    ({"directory": "/" + "x" * 5_000}, errors.TooLarge),
    ({"gpus": 0}, errors.Usage),
    ({"gpus": 3}, errors.NeverFitsError),
    ({"gpu_memory_mib": 50_000}, errors.NeverFitsError),
    ({"gpu_memory_mib": 0}, errors.Usage),
    ({"threads_percent": 0}, errors.Usage),
    ({"threads_percent": 101}, errors.Usage),
    ({"threads_percent": 20, "mechanism": "timeslice"}, errors.Usage),
    ({"gpu_memory_mib": 10**30}, errors.Usage),
    ({"time_limit_s": 0.0}, errors.Usage),
    ({"time_limit_s": -1.0}, errors.Usage),
    ({"grace_s": 1e9}, errors.Usage),
    ({"max_oom_retries": -1}, errors.Usage),
    ({"umask": 0o1777}, errors.Usage),
    ({"priority": -(10**9)}, errors.Usage),
    ({"begin_at": 1e300}, errors.Usage),
    ({"begin_at": 4e9 + 1e9}, errors.Usage),
    ({"warn": WarnSignal(0, 5.0)}, errors.Usage),
    ({"warn": WarnSignal(10, -5.0)}, errors.Usage),
    ({"after": (Dependency(TaskId(99)),)}, errors.NotFound),
    ({"after": tuple(Dependency(TaskId(number)) for number in range(1, 1_002))}, errors.TooLarge),
    ({"slurm": {"CUDA_VISIBLE_DEVICES": "0"}}, errors.Usage),
    ({"slurm": {"SLURM_=X": "1"}}, errors.Usage),
    ({"slurm": {"SLURM_X": "a\0b"}}, errors.Usage),
]


@pytest.mark.parametrize(("spec", "kind"), REFUSED, ids=lambda value: repr(value)[:60])
def test_a_spec_that_cannot_work_is_refused(
    served: Served, spec: dict[str, Any], kind: type[errors.CarmaError]
) -> None:
    before = served.shell.sequence
    with pytest.raises(errors.CarmaError) as caught:
        submit(served, spec)
    assert type(caught.value) is kind
    assert served.shell.sequence == before


def submit(served: Served, spec: dict[str, Any]) -> None:
    fields = dict(spec)
    served.client().submit(served.request(*fields.pop("command", ("true",)), **fields))


def test_the_refusal_of_a_spec_names_the_field_the_value_and_the_limit(served: Served) -> None:
    sentences: dict[str, str] = {}
    for number, (spec, _) in enumerate(REFUSED):
        with pytest.raises(errors.CarmaError) as caught:
            submit(served, spec)
        text = str(caught.value).replace(str(STRING_BYTES), "STRING_BYTES")  # depends on the size of a page
        sentences[f"{number}: {repr(spec)[:60]}"] = f"{text}\n{caught.value.hint}"
    assert_wording("submission", sentences)


def test_the_place_in_an_array_is_the_daemons_to_give(served: Served) -> None:
    spec = TaskSpec(command=("true",), directory="/", array=ArrayPlace(TaskId(1), 0))
    with pytest.raises(errors.Usage, match=r"spec\.array"):
        served.client().submit(SubmitRequest(spec=spec))


@pytest.mark.parametrize(
    ("array", "kind", "named"),
    [
        (ArrayAsk(()), errors.Usage, "no index"),
        (ArrayAsk((1, 1)), errors.Usage, "twice"),
        (ArrayAsk((-1,)), errors.Usage, "array index"),
        (ArrayAsk((1, 2), at_once=0), errors.Usage, "at_once"),
        (ArrayAsk(tuple(range(10_001))), errors.TooLarge, "10001 tasks"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_an_array_that_cannot_work_is_refused(
    served: Served, array: ArrayAsk, kind: type[errors.CarmaError], named: str
) -> None:
    with pytest.raises(kind, match=named):
        served.client().submit(served.request(array=array))


@pytest.mark.parametrize(
    "fields",
    [
        {"command": ("true", "x" * 100_000)},
        {"output": "x" * 4_000, "comment": "x" * 2_000, "name": "x" * 200, "command": ("true", "x" * 1_000)},
        {"after": tuple(Dependency(TaskId(number)) for number in range(1, 1_001))},
        {"slurm": {"SLURM_X": "x" * 10_000}},
    ],
)
def test_an_array_that_repeats_too_much_for_each_task_is_refused(served: Served, fields: dict[str, Any]) -> None:
    command = fields.pop("command", ("true",))
    with pytest.raises(errors.TooLarge, match="each task"):
        served.client().submit(served.request(*command, array=ArrayAsk(tuple(range(10_000))), **fields))


def test_the_environment_of_an_array_counts_once(served: Served) -> None:
    environment = {"PATH": "/bin", "A": "x" * 100_000}
    request = served.request("true", array=ArrayAsk(tuple(range(3_000))), environment=environment, held=True)
    assert len(served.client().submit(request).ids) == 3_000
    assert len({id(task.spec.environment) for task in served.shell.state.tasks.values()}) == 1


def test_without_gpus_nothing_is_accepted() -> None:
    with serving(gpus=0) as served, pytest.raises(errors.NoGpus):
        served.client().submit(served.request())


def test_unusual_but_valid_submissions_are_accepted(served: Served, tmp_path: Path) -> None:
    program = tmp_path / "it's; $(odd) | & \n name"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    client = served.client()
    for command in ((str(program), "$HOME", "`id`", "*", "ünïcödé", ""), (f"./{program.name}",), (program.name,)):
        environment = {"PATH": f"/nowhere::{tmp_path}"}
        request = served.request(*command, directory=str(tmp_path), environment=environment, name="a 'b' ü")
        view = client.task(client.submit(request).ids[0])
        assert view.command == command
    late = client.submit(served.request(begin_at=1.0)).ids[0]
    assert client.task(late).begin_at is None  # a start in the past is no condition


@pytest.mark.parametrize(
    ("server", "asked", "percent"),
    [("timeslice", "mps", None), ("timeslice", None, 20), ("mig", "mps", None), ("mig", "timeslice", None)],
)
def test_a_way_of_sharing_that_the_settings_rule_out_is_refused(
    server: Literal["timeslice", "mig"], asked: Literal["timeslice", "mps"] | None, percent: int | None
) -> None:
    state = State(Rules(sharing=Sharing(mechanism=server)), magm.POLICY)
    spec = TaskSpec(command=("true",), directory="/", mechanism=asked, threads_percent=percent)
    with pytest.raises(errors.Refused, match=f"sharing.mechanism = '{server}'"):
        sharing_note(state, spec)
    assert sharing_note(state, TaskSpec(command=("true",), directory="/")) == ""


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("card", ""),
        ("virtual", "virtual GPUs have no MPS; --mechanism mps is without effect"),
        ("mig", "MIG instances have no MPS; --mechanism mps is without effect"),
    ],
)
def test_gpus_without_mps_are_noted_and_not_refused(kind: Literal["card", "mig", "virtual"], note: str) -> None:
    state = State(Rules(), magm.POLICY)
    state.gpus = {GpuId("GPU-0"): replace(gpu(0), kind=kind)}
    mps = TaskSpec(command=("true",), directory="/", mechanism="mps")
    assert sharing_note(state, mps) == note
    assert sharing_note(state, replace(mps, mechanism="timeslice")) == ""
    by_percent = sharing_note(state, replace(mps, mechanism=None, threads_percent=20))
    assert by_percent == note.replace("--mechanism mps", "--threads-percent 20")
    both = sharing_note(state, replace(mps, threads_percent=20))
    assert both == note.replace("--mechanism mps is", "--mechanism mps and --threads-percent 20 are")


def test_the_note_travels_with_the_answer_and_with_a_dry_run(served: Served) -> None:
    client = served.client()
    assert "virtual GPUs have no MPS" in client.submit(served.request("true", mechanism="mps")).note
    foretold = client.submit(served.request("true", mechanism="mps", dry_run=True))
    assert "would" in foretold.note
    assert "virtual GPUs have no MPS" in foretold.note
    assert client.submit(served.request("true")).note == ""

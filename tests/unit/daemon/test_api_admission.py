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
from carma.core.state import new_state
from carma.daemon.api.submission_checks import sharing_note
from carma.testing.builders import gpu
from carma.wire.api_types import ArrayAsk, SubmitRequest
from tests.unit.daemon.api_server import Served, serving

NUL = "a\0b"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as made:
        yield made


@pytest.mark.parametrize(
    ("spec", "kind", "named"),
    [
        ({"command": ("",)}, errors.Usage, "command is empty"),
        ({"command": ("true", NUL)}, errors.Usage, "NUL"),
        ({"name": NUL}, errors.Usage, "NUL"),
        ({"comment": NUL}, errors.Usage, "NUL"),
        ({"output": NUL}, errors.Usage, "NUL"),
        ({"environment": {"PATH": "/bin", "A": NUL}}, errors.Usage, "NUL"),
        ({"environment": {"A=B": "c"}}, errors.Usage, "environment variable"),
        ({"environment": {"": "c"}}, errors.Usage, "environment variable"),
        ({"name": "x" * 201}, errors.Usage, "201 characters"),
        ({"name": "two\nlines"}, errors.Usage, "cannot be printed"),
        ({"name": "\x1b[31m"}, errors.Usage, "cannot be printed"),
        ({"comment": "x" * 2_001}, errors.TooLarge, "comment"),
        ({"directory": "relative"}, errors.Usage, "absolute"),
        ({"directory": "/no/such/place"}, errors.NotRunnable, "does not exist"),
        ({"directory": "/etc/passwd"}, errors.NotRunnable, "not a directory"),
        ({"command": ("no-such-program-x",)}, errors.NotRunnable, "'no-such-program-x' is not in any directory"),
        ({"command": ("/no/such/program",)}, errors.NotRunnable, "/no/such/program does not exist"),
        ({"command": ("./nothing",)}, errors.NotRunnable, "does not exist in /"),
        ({"command": ("/etc",)}, errors.NotRunnable, "does not exist"),
        ({"command": ("/etc/passwd",)}, errors.NotRunnable, "not executable"),
        ({"command": ("true; rm -rf /",)}, errors.NotRunnable, "not"),
        ({"command": ("true", "x" * 200_000)}, errors.TooLarge, "one argument"),
        ({"command": ("true", *["x" * 100_000] * 11)}, errors.TooLarge, "command has"),
        ({"environment": {f"A{number}": "x" * 100_000 for number in range(45)}}, errors.TooLarge, "environment has"),
        ({"directory": "/" + "x" * 5_000}, errors.TooLarge, "path"),
        ({"gpus": 0}, errors.Usage, "gpus"),
        ({"gpus": 3}, errors.NeverFitsError, "asks for 3 GPUs"),
        ({"gpu_memory_mib": 50_000}, errors.NeverFitsError, "largest GPU here is GPU 0 with 40.0 GiB"),
        ({"gpu_memory_mib": 0}, errors.Usage, "gpu_memory_mib"),
        ({"threads_percent": 0}, errors.Usage, "threads_percent"),
        ({"threads_percent": 101}, errors.Usage, "threads_percent"),
        ({"threads_percent": 20, "mechanism": "timeslice"}, errors.Usage, "threads_percent is MPS's"),
        ({"gpu_memory_mib": 10**30}, errors.Usage, "gpu_memory_mib"),
        ({"time_limit_s": 0.0}, errors.Usage, "time_limit_s"),
        ({"time_limit_s": -1.0}, errors.Usage, "time_limit_s"),
        ({"grace_s": 1e9}, errors.Usage, "grace_s"),
        ({"max_oom_retries": -1}, errors.Usage, "max_oom_retries"),
        ({"umask": 0o1777}, errors.Usage, "umask"),
        ({"priority": -(10**9)}, errors.Usage, "priority"),
        ({"begin_at": 1e300}, errors.Usage, "asked for, after the year 9999, is not within the next 30 years"),
        ({"begin_at": 4e9 + 1e9}, errors.Usage, "asked for, 2128-06-11 08:53 UTC, is not within"),
        ({"warn": WarnSignal(0, 5.0)}, errors.Usage, "warn.signal"),
        ({"warn": WarnSignal(10, -5.0)}, errors.Usage, "warn.before_s"),
        ({"after": (Dependency(TaskId(99)),)}, errors.NotFound, "no task 99"),
        ({"after": tuple(Dependency(TaskId(number)) for number in range(1, 1_002))}, errors.TooLarge, "1001 tasks"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_spec_that_cannot_work_is_refused(
    served: Served, spec: dict[str, Any], kind: type[errors.CarmaError], named: str
) -> None:
    before = served.shell.sequence
    fields: dict[str, Any] = {"command": ("true",), **spec}
    command = fields.pop("command")
    with pytest.raises(kind, match=named):
        served.client().submit(served.request(*command, **fields))
    assert served.shell.sequence == before


def test_the_place_in_an_array_is_the_daemons_to_give(served: Served) -> None:
    spec = TaskSpec(command=("true",), directory="/", array=ArrayPlace(TaskId(1), 0))
    with pytest.raises(errors.Usage, match=r"spec\.array is set by the daemon"):
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
    ],
)
def test_an_array_that_repeats_too_much_for_each_task_is_refused(served: Served, fields: dict[str, Any]) -> None:
    command = fields.pop("command", ("true",))
    with pytest.raises(errors.TooLarge, match="the array repeats"):
        served.client().submit(served.request(*command, array=ArrayAsk(tuple(range(10_000))), **fields))


def test_the_environment_of_an_array_counts_once(served: Served) -> None:
    environment = {"PATH": "/bin", "A": "x" * 100_000}
    request = served.request("true", array=ArrayAsk(tuple(range(3_000))), environment=environment, held=True)
    assert len(served.client().submit(request).ids) == 3_000
    assert len({id(task.spec.environment) for task in served.shell.state.tasks.values()}) == 1


def test_without_gpus_nothing_is_accepted() -> None:
    with serving(gpus=0) as served, pytest.raises(errors.NoGpus, match="no GPU"):
        served.client().submit(served.request())


def test_odd_but_possible_things_are_accepted(served: Served, tmp_path: Path) -> None:
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
    state = new_state(Rules(sharing=Sharing(mechanism=server)), magm.POLICY)
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
    state = new_state(Rules(), magm.POLICY)
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

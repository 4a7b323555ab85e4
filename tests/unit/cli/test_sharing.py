"""Sharing, limits, activity and energy of tasks in the tables and lists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from carma.cli import carma
from carma.cli.wording import gpu_hours, short_ending
from carma.core.model.units import show_j
from carma.wire import api_types as t
from carma.wire.sharing_text import guards_phrase
from tests.golden_text import assert_wording
from tests.unit.cli.scripted_daemon import FakeDaemon, finished, gpu_view, running

MPS = t.GuardView(rung="mps", limit_mib=8_192, how="MPS's memory limit")
TORCH = t.GuardView(rung="framework", limit_mib=8_192, how="PyTorch's own")
JAX = t.GuardView(rung="framework", limit_mib=7_168)
# As the launcher writes them.
CGROUP = t.GuardView(rung="cgroup", limit_mib=8_192, how="the driver's limit on its cgroup")
MPS_EACH = t.GuardView(rung="mps", limit_mib=8_192, how="MPS's memory limit, for each process")
TORCH_EACH = t.GuardView(rung="framework", limit_mib=8_192, how="PyTorch 2.11.0+cu130 or 2.13.0, each process")
JAX_EACH = t.GuardView(rung="framework", limit_mib=8_192, how="JAX of unknown version, each process")
CUPY_EACH = t.GuardView(rung="framework", limit_mib=8_192, how="CuPy 14.2.0, each process")
CUPY_LESS = t.GuardView(rung="framework", limit_mib=6_144, how="CuPy 14.2.0, each process")
WATCHDOG = t.GuardView(rung="watchdog", limit_mib=8_192)
BUSY = t.ActivityView(sm_active=0.41, sm_occupancy=0.2, dram_active=0.1, gr_active=0.97)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        monkeypatch.setenv("COLUMNS", "100")
        yield fake


def call(*words: str) -> Result:
    result = CliRunner().invoke(carma, list(words))
    assert "Traceback" not in result.output
    return result


def lines(*words: str) -> list[str]:
    result = call(*words)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def shared(task: int, **changes: Any) -> t.TaskView:
    view = running(task)
    attempt = msgspec.structs.replace(view.attempts[0], **changes)
    return msgspec.structs.replace(view, attempts=(attempt,), mechanism=attempt.mechanism, energy_j=attempt.energy_j)


GUARDS = {
    "none": (),
    "MPS": (MPS,),
    "MPS, watchdog": (MPS, WATCHDOG),
    "MPS, framework, watchdog": (MPS, TORCH, WATCHDOG),
    "MPS, lower limit of a framework": (MPS, JAX),
    "all frameworks, for each process": (MPS_EACH, TORCH_EACH, JAX_EACH, CUPY_EACH, WATCHDOG),
    "one framework, for each process": (TORCH_EACH, WATCHDOG),
    "different limits for each process": (MPS_EACH, TORCH_EACH, JAX_EACH, CUPY_LESS),
    "cgroup, MPS for each process": (CGROUP, MPS_EACH),
    "watchdog": (WATCHDOG,),
}


def test_show_names_the_source_of_inferred_activity(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: shared(1, activity=BUSY, activity_inferred=True)}
    (line,) = [line for line in lines("show", "1") if line.split()[0] == "activity"]
    assert "any kernel 97 % (inferred from" in line


def test_the_guards_of_a_task_are_named_with_their_limits() -> None:
    assert_wording("guards", {name: guards_phrase(guards) for name, guards in GUARDS.items()})


def test_show_has_no_line_about_sharing_for_an_attempt_without_a_known_mechanism(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: shared(1)}
    assert not any("shares" in line for line in lines("show", "1"))


def test_the_columns_of_sharing_can_be_asked_for(daemon: FakeDaemon) -> None:
    known = shared(1, mechanism="mps", guards=(MPS, WATCHDOG), energy_j=7_200.0)
    daemon.tasks = {1: msgspec.structs.replace(known, sm_active=0.414), 2: running(2)}
    rows = lines("queue", "-o", "id,energy,sm,mechanism,guard", "--no-header")
    assert [row.split() for row in rows] == [["1", "2.0", "Wh", "41", "mps", "mps", "8.0G"], ["2", "-", "-", "-", "-"]]


def test_history_shows_energy_and_sums_it_up(daemon: FakeDaemon) -> None:
    on_two = msgspec.structs.replace(finished(3).attempts[0], gpus=("GPU-0", "GPU-1"))
    daemon.tasks = {
        1: finished(1, energy_j=3_600.0),
        2: finished(2, energy_j=7_200.0),
        3: finished(3, attempts=(on_two,)),
    }
    titles, *rows, sums = lines("history")
    assert "ENERGY" in titles
    assert ["1.0 Wh" in rows[0], "2.0 Wh" in rows[1]] == [True, True]
    assert sums == "3 tasks, 6.0 GPU-minutes, 3.0 Wh"  # 90 s each, on one, one and two GPUs
    assert "tasks," not in lines("history", "--no-header")[-1]
    assert "tasks," not in lines("history", "-o", "id")[-1]
    daemon.tasks = {1: finished(1)}
    assert "task" not in lines("history")[-1]


def test_csv_has_joules_and_shares_as_numbers(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: finished(1, energy_j=3_600.04, sm_active=0.41)}
    assert lines("history", "--csv", "-o", "id,energy,sm", "--no-header") == ["1,3600.0,0.41"]


def test_a_disrupted_task_has_its_code_and_its_reason(daemon: FakeDaemon) -> None:
    outcome = {"kind": "disrupted", "reason": "its MPS server ended"}
    view = finished(1, code=1, outcome=outcome, reason="disrupted: its MPS server ended")
    daemon.tasks = {1: msgspec.structs.replace(view, code="DI")}
    assert short_ending(view) == "its MPS server ended"
    row = lines("history")[1]
    assert row.split()[2] == "DI"
    assert row.endswith("its MPS server ended")
    assert "DI disrupted" in call("history", "--help").stdout


@pytest.mark.parametrize(
    ("joules", "said"),
    [
        (None, "-"),
        (0.0, "0 J"),
        (0.04, "0.04 J"),
        (0.96, "1.0 J"),
        (4.2, "4.2 J"),
        (90.0, "90 J"),
        (1_800.0, "1,800 J"),
        (3_599.4, "3,599 J"),
        (3_599.6, "1.0 Wh"),
        (3_600.0, "1.0 Wh"),
        (359_900.0, "100 Wh"),
        (1_483_200.0, "412 Wh"),
        (3_599_000.0, "1.0 kWh"),
        (1.2e7, "3.3 kWh"),
    ],
)
def test_energy_has_a_unit_that_fits_its_size(joules: float | None, said: str) -> None:
    assert show_j(joules) == said


def test_energies_of_a_column_have_the_unit_of_the_largest() -> None:
    energies = (None, 0.0, 1.0, 1_862.0, 34_560.0)
    assert [show_j(each, 34_560.0) for each in energies] == ["-", "0 Wh", "0 Wh", "0.5 Wh", "9.6 Wh"]
    assert [show_j(each, 1_862.0) for each in energies[2:4]] == ["1.0 J", "1,862 J"]
    assert show_j(34_560.0, 1e8) == "0.01 kWh"


def test_gpu_time_has_a_unit_that_fits_its_size() -> None:
    said = {
        11_160.0: "3.1 GPU-hours",
        90.0: "1.5 GPU-minutes",
        59.97: "1.0 GPU-minutes",
        1.6: "1.6 GPU-seconds",
        0.0: "0.0 GPU-hours",
    }
    assert {gpu_s: gpu_hours(gpu_s) for gpu_s in said} == said


def test_gpus_prints_the_source_of_the_metrics(daemon: FakeDaemon) -> None:
    fine = gpu_view(0, name="H200", metrics="gpm", gr_active=0.97, tensor_active=0.33)
    daemon.answers["gpus"] = [fine]
    assert lines("gpus")[0] == "1 GPU: H200; activity from NVML's GPM"
    titles, row = lines("gpus", "-w")
    assert titles.split()[-6:] == ["GRACT", "TENSOR", "METRICS", "SLOWDOWN", "W", "STATE"]
    assert row.split()[-6:] == ["97", "33", "gpm", "-", "180", "open"]
    daemon.answers["gpus"] = [gpu_view(0, name="A100", metrics="nvml", sm_active=None)]
    assert lines("gpus")[0].startswith("1 GPU: A100; coarse utilisation only")
    assert json.loads("\n".join(lines("gpus", "--json")))[0]["gr_active"] is None
    daemon.answers["gpus"] = [gpu_view(0, name="A40", metrics="inferred", activity_source="inferred")]
    assert lines("gpus")[0].startswith("1 GPU: A40; activity inferred from power and utilisation")
    assert json.loads("\n".join(lines("gpus", "--json")))[0]["activity_source"] == "inferred"


@pytest.mark.parametrize("verb", ["submit", "run"])
def test_the_mechanism_travels_from_the_flags(daemon: FakeDaemon, verb: str) -> None:
    daemon.tasks = {1: finished(1)}
    assert call(verb, "--mechanism", "mps", "--threads-percent", "20", "--", "true").exit_code == 0
    (request,) = daemon.asked("submit")
    assert (request.spec.mechanism, request.spec.threads_percent) == ("mps", 20)


def test_the_mechanism_travels_from_files(daemon: FakeDaemon, tmp_path: Path) -> None:
    script, file = tmp_path / "run.sh", tmp_path / "task.toml"
    script.write_text("#!/bin/sh\n#CARMA --mechanism timeslice\ntrue\n")
    file.write_text('command = ["true"]\nmechanism = "mps"\nthreads_percent = 40\n')
    assert call("submit", str(script)).exit_code == 0
    assert call("submit", "--file", str(file)).exit_code == 0
    assert call("submit", "--threads-percent", "50", str(file)).exit_code == 0
    specs = [request.spec for request in daemon.asked("submit")]
    assert [(spec.mechanism, spec.threads_percent) for spec in specs] == [("timeslice", None), ("mps", 40), ("mps", 50)]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--threads-percent", "0"], "between 1 and 100"),
        (["--threads-percent", "101"], "between 1 and 100"),
        (["--mechanism", "mig"], "mig"),
        (["--mechanism", "timeslice", "--threads-percent", "20"], "--threads-percent needs MPS"),
    ],
)
def test_a_mechanism_that_means_nothing_is_refused_before_it_is_sent(
    daemon: FakeDaemon, flags: list[str], said: str
) -> None:
    result = call("submit", *flags, "--", "true")
    assert result.exit_code == 2
    assert said in result.stderr
    assert not daemon.asked("submit")

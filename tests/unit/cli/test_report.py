"""`carma report`: the page, its sums, and what it says where something is not known."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import msgspec
import pytest
from click.testing import CliRunner

from carma.cli import carma
from carma.wire.report_types import GpuWork, Report, UserWork, Work
from tests.unit.cli.scripted_daemon import NOW, FakeDaemon

ADA = Work(
    ended={"succeeded": 9, "out_of_memory": 2},
    running=1,
    started=10,
    waited_s=600.0,
    longest_wait_s=300.0,
    attempts=14,
    run_s=9_000.0,
    gpu_s=11_160.0,
    energy_j=360_000.0,
)
BOB = Work(ended={"disrupted": 1}, attempts=1, run_s=10.0, gpu_s=10.0, unmeasured=1)
ALL = Work(
    ended={"succeeded": 9, "out_of_memory": 2, "disrupted": 1},
    running=1,
    started=10,
    waited_s=600.0,
    longest_wait_s=300.0,
    attempts=15,
    run_s=9_010.0,
    gpu_s=11_170.0,
    energy_j=360_000.0,
    unmeasured=1,
)
CARD = GpuWork(
    gpu="GPU-0",
    index=0,
    name="H200",
    watched_s=7_200.0,
    held_s=3_600.0,
    shared_s=1_800.0,
    sm_active=0.25,
    energy_j=1_440_000.0,
    idle_j=1_080_000.0,
    tasks_j=324_000.0,
    power_w=200.0,
)
GONE = GpuWork(gpu="GPU-b7c1", index=None)
REPORT = Report(
    since=NOW - 7_200,
    until=NOW,
    total=ALL,
    users=(UserWork(user="ada", uid=1000, work=ADA), UserWork(user="bob", uid=1001, work=BOB)),
    gpus=(CARD, GONE),
    notes=("GPU GPU-b7c1: nothing is known of 02:00:00",),
)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        monkeypatch.setenv("COLUMNS", "80")
        fake.answers["report"] = REPORT
        yield fake


def lines(*words: str) -> list[str]:
    result = CliRunner().invoke(carma, ["report", *words])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_energies_of_users_and_gpus_have_one_unit(daemon: FakeDaemon) -> None:
    small = msgspec.structs.replace(BOB, unmeasured=0, energy_j=1_862.0)
    users = (REPORT.users[0], UserWork(user="bob", uid=1001, work=small))
    gpus = (CARD, msgspec.structs.replace(CARD, index=1, energy_j=7_200.0, idle_j=1_800.0, tasks_j=0.0))
    daemon.answers["report"] = msgspec.structs.replace(REPORT, users=users, gpus=gpus)
    page = lines()
    assert [line.split()[-2:] for line in page if line.startswith(("ada", "bob"))] == [["100", "Wh"], ["0.5", "Wh"]]
    assert page[-3].split()[-6:] == ["2.0", "Wh", "0.5", "Wh", "0", "Wh"]


@pytest.mark.usefixtures("daemon")
def test_the_report_prints_tasks_time_waiting_and_energy() -> None:
    page = lines()
    assert page[0].endswith(" until now (02:00:00)")
    numbers = [re.findall(r"\d[\d.:]*", line) for line in page[1:5]]
    assert numbers == [
        ["12", "9", "2", "1", "1"],
        ["3.1", "15"],
        ["01:00", "10", "05:00"],
        ["400", "300", "90.0", "10.0"],
    ]
    assert max(map(len, page)) <= 80


@pytest.mark.usefixtures("daemon")
def test_users_and_gpus_are_tables() -> None:
    page = lines()
    users = page.index(next(line for line in page if line.startswith("USER")))
    assert page[users + 1].split() == ["ada", "11", "9", "1", "03:06:00", "01:00", "100", "Wh"]
    assert page[users + 2].split() == ["bob", "1", "0", "0", "10", "s", "-", "-"]
    gpus = page.index(next(line for line in page if line.startswith("GPU  ")))
    row = "0 02:00:00 50 25 25 200 400 Wh 300 Wh 90.0 Wh"
    assert " ".join(page[gpus + 1].split()) == row
    assert page[gpus + 2].split()[0] == "GPU-b7c1"
    assert page[gpus + 2].split()[2:] == ["s", *["-"] * 7]
    assert page[-1].startswith("note")


def test_the_span_is_asked_of_the_daemon_and_json_is_its_answer(daemon: FakeDaemon) -> None:
    told = json.loads("\n".join(lines("--since", "2026-01-31", "--json")))
    assert told["total"]["ended"]["succeeded"] == 9
    (query,) = [query for name, _, query, _ in daemon.requests if name == "report"]
    assert float(query["since"]) > 1.7e9


def test_a_span_counts_back_by_the_daemons_clock(daemon: FakeDaemon) -> None:
    assert lines("--since", "2h")[0].endswith(" until now (02:00:00)")
    assert "02:00:00" in lines("--since", "90m")[0]
    CliRunner().invoke(carma, ["history", "--since", "1h"])
    asked = [float(query["since"]) for name, _, query, _ in daemon.requests if name in ("report", "history")]
    assert asked == [NOW - 7_200, NOW - 5_400, NOW - 3_600]


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("verb", ["report", "history"])
@pytest.mark.parametrize("since", ["9999-01-01", "later"])
def test_a_span_that_begins_in_the_future_is_refused_as_nonsense_is(verb: str, since: str) -> None:
    result = CliRunner().invoke(carma, [verb, "--since", since])
    assert result.exit_code == 2
    assert "--since" in result.stderr
    assert repr(since) in result.stderr


def test_the_report_of_an_unused_server_has_no_tables(daemon: FakeDaemon) -> None:
    daemon.answers["report"] = Report(since=NOW - 3_600, until=NOW, total=Work(), gpus=(GONE,))
    page = lines()
    assert page[1].split() == ["tasks", "none", "ended"]
    assert not any(line.startswith(("ran", "waited", "energy", "USER")) for line in page)

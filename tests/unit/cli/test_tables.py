"""Tables and lists at 80 columns and on a wide terminal: nothing is printed twice, nothing misleads."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from carma.cli import carma
from carma.cli.output import Column, print_table
from carma.cli.wording import score_text, short_ending
from carma.wire import api_types as t
from tests.unit.cli.scripted_daemon import NOW, FakeDaemon, finished, gpu_view, running, task_view

BUSY = "is too busy: sm_active 0.93 (cap 0.80), dram_active 0.51 (cap 0.40)"


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    with FakeDaemon() as fake:
        monkeypatch.setenv("CARMA_HOME", str(fake.home))
        monkeypatch.setenv("COLUMNS", "80")
        yield fake


def lines(*words: str) -> list[str]:
    result = CliRunner().invoke(carma, list(words))
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def entry(index: int, **fields: Any) -> t.ExplainEntry:
    return t.ExplainEntry(gpu=f"GPU-{index}", index=index, **fields)


def test_gpus_of_one_kind_are_named_once(daemon: FakeDaemon) -> None:
    daemon.answers["gpus"] = [gpu_view(0, name="NVIDIA H200"), gpu_view(1, name="NVIDIA H200")]
    first, titles, *rows = lines("gpus")
    assert first == "2 GPUs: H200"
    assert "NAME" not in titles
    assert not any("H200" in row for row in rows)
    daemon.answers["gpus"] = [gpu_view(0, name="NVIDIA H200"), gpu_view(1, name="NVIDIA A100")]
    titles, *rows = lines("gpus")
    assert "NAME" in titles
    assert ["H200" in rows[0], "A100" in rows[1]] == [True, True]


def test_a_reason_that_does_not_fit_goes_below_its_row(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon.answers["gpus"] = [gpu_view(0, state="closed", reason=BUSY), gpu_view(1)]
    _, _, closed, why, opened = lines("gpus")
    assert closed.endswith("closed")
    assert why == f"     {BUSY.removeprefix('is ')}"
    assert opened.endswith("open")
    monkeypatch.setenv("COLUMNS", "140")
    assert lines("gpus")[2].endswith(f"closed: {BUSY.removeprefix('is ')}")
    assert lines("gpus", "--wide")[1].endswith(f"closed: {BUSY.removeprefix('is ')}")
    assert len(lines("gpus", "--no-header")) == 2


@pytest.mark.parametrize(
    ("state", "reason", "told"),
    [
        ("drained", "is drained: fan", "drained: fan"),
        ("drained", "is drained", "drained"),
        ("fault", "cannot be used: fell off the bus", "fault: fell off the bus"),
        ("warming", "task 4 is warming up: it still grows", "warming: task 4: it still grows"),
        ("exclusive", "task 3 has it alone", "exclusive: task 3 has it alone"),
        ("idle", "", "idle"),
    ],
)
def test_the_state_of_a_gpu_is_printed_once(daemon: FakeDaemon, state: str, reason: str, told: str) -> None:
    daemon.answers["gpus"] = [gpu_view(0, state=state, reason=reason)]
    (row,) = lines("gpus", "--wide", "--no-header")
    assert row.endswith(f"180  {told}")


def test_the_queue_prints_the_next_need_and_the_waiting_time_of_a_task(daemon: FakeDaemon) -> None:
    ended = running(1).attempts[0]
    again = running(
        1,
        state="queued",
        code="PD",
        reason="GPU 0: " + BUSY,
        reason_short="GPU 0 is busy: SM 0.93 (cap 0.80)",
        needs_mib=25_000,
        attempts=(msgspec.structs.replace(ended, ended_at=NOW - 30),),
    )
    daemon.tasks = {1: again}
    row = lines("queue")[1]
    assert row == " 1  train  PD  30 s  1x24.4G  GPU 0 is busy: SM 0.93 (cap 0.80)"
    card = lines("show", "1")
    assert not any(line.startswith(("started", "GPUs")) for line in card)


def test_history_prints_why_a_task_ended(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "92")
    long = "ValueError: the learning rate must be above zero, and this one is not"
    daemon.tasks = {
        1: finished(1),
        2: finished(2, code=3, outcome={"kind": "failed", "code": 3, "message": long}),
        3: finished(3, outcome={"kind": "cancelled", "by": "bob"}, started_at=None, attempts=()),
    }
    titles, good, failed, why, cancelled, _sums = lines("history")
    assert titles.endswith("WHY")
    assert good.endswith(lines("history", "-o", "ended", "--no-header")[0])
    assert why == "     " + long
    assert cancelled.endswith("by bob")
    assert cancelled.split()[4] == "-"  # it never ran
    assert failed.split()[2:4] == ["F", "3"]
    assert len(lines("history", "--no-header")) == 3
    assert "WHY" not in lines("history", "-o", "id,name")[0]


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        ({"kind": "succeeded"}, ""),
        ({"kind": "failed", "code": 1}, ""),
        (
            {"kind": "out_of_memory", "where": "gpu", "asked_mib": 2048, "peak_mib": 700},
            "held 700 MiB, requested 2.0 GiB more",
        ),
        ({"kind": "out_of_memory", "where": "host", "message": "killed"}, "killed"),
        ({"kind": "cancelled", "by": "bob", "reason": "too slow"}, "by bob: too slow"),
        ({"kind": "timed_out", "limit_s": 600.0}, "limit 10:00"),
        ({"kind": "lost", "reason": "the machine restarted"}, "the machine restarted"),
        ({"kind": "of a newer daemon"}, "the whole reason"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_ending_in_short(outcome: dict[str, Any], told: str) -> None:
    assert short_ending(finished(1, outcome=outcome, reason="the whole reason")) == told


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("room_mib", 40_960.0, "room 40.0 GiB"),
        ("left_mib", -2_560.0, "left -2.5 GiB"),
        ("sm_free", 0.9312, "sm free 0.93"),
        ("turn", -3.0, "turn -3"),
        ("odd", 1.5e-7, "odd 1.5e-07"),
    ],
)
def test_a_score_is_a_figure_that_people_read(name: str, value: float, told: str) -> None:
    assert score_text(name, value) == told


def test_explain_names_the_gpus_whose_activity_is_inferred(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: running(1)}
    entries = [
        entry(0, accepted=True, reason="chosen", chosen=True, activity_source="measured"),
        *(entry(index, accepted=True, reason="could take it", activity_source="inferred") for index in (1, 2)),
    ]
    answer = t.Explanation(task=1, policy="magm", state="running", reason="placed", entries=tuple(entries))
    daemon.answers["explain"] = answer
    (said,) = [line for line in lines("explain", "1") if line.split()[0] == "activity"]
    assert "GPU 1, 2: inferred from power" in said
    daemon.answers["explain"] = msgspec.structs.replace(answer, entries=tuple(entries[:1]))
    assert not [line for line in lines("explain", "1") if line.split()[0] == "activity"]


def test_energies_in_the_history_have_one_unit(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: finished(1, energy_j=34_560.0), 2: finished(2, energy_j=1_862.0), 3: finished(3, energy_j=None)}
    assert [row.strip() for row in lines("history", "--no-header", "-o", "energy")] == ["9.6 Wh", "0.5 Wh", "-"]


def test_explain_of_a_task_that_never_had_a_gpu_has_no_table(daemon: FakeDaemon) -> None:
    daemon.tasks = {1: finished(1)}
    daemon.answers["explain"] = t.Explanation(
        task=1,
        policy="magm",
        state="finished",
        reason="cancelled by ada",
        entries=(entry(0, accepted=False, reason="the task ended before a GPU was chosen"),),
    )
    told = lines("explain", "1")
    assert "VERDICT" not in "".join(told)
    assert any(line.endswith("cancelled by ada") for line in told)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"source": "declared", "declared": 2_048, "booked": 2_048, "seen": None}, "2.0 GiB declared and booked"),
        (
            {"source": "declared", "declared": 2_048, "booked": 2_048, "seen": 1_024},
            "2.0 GiB declared and booked, 1.0 GiB observed",
        ),
        ({"source": "fixed", "declared": None, "booked": None, "seen": None}, "2.0 GiB estimated by fixed"),
    ],
)
def test_equal_memory_figures_are_printed_once(daemon: FakeDaemon, fields: dict[str, Any], told: str) -> None:
    daemon.tasks = {
        1: task_view(
            1,
            gpu_memory_mib=fields["declared"],
            booking_mib=fields["booked"],
            observed_mib=fields["seen"],
            estimate=t.EstimateView(footprint_mib=2_048, upper_mib=2_048, source=fields["source"]),
        )
    }
    (memory,) = [line for line in lines("show", "1") if line.startswith("memory")]
    assert memory.split(maxsplit=1)[1] == told


def test_blame_is_a_sentence(daemon: FakeDaemon) -> None:
    view = finished(1, code=1)
    daemon.tasks = {
        1: msgspec.structs.replace(view, attempts=(msgspec.structs.replace(view.attempts[0], blame="own"),))
    }
    assert any(line.split()[:2] == ["blame", "own:"] for line in lines("show", "1"))


def test_an_array_shows_its_indices_and_a_gang_how_many_gpus_it_could_have(daemon: FakeDaemon) -> None:
    gang = "needs 2 GPUs; 1 of 3 can take it now; needs 12.4 GiB; most free is 9.1 GiB on GPU 2"
    daemon.tasks = {5: task_view(5, array="4[17]", gpus_wanted=2, reason=gang)}
    daemon.tasks[5] = msgspec.structs.replace(daemon.tasks[5], reason_short="needs 2 GPUs, 1 of 3 can take it")
    assert lines("queue")[1].endswith("needs 2 GPUs, 1 of 3 can take it")
    row = lines("queue", "--wide")[1]
    assert "train[17]" in row
    assert row.endswith(gang.partition("; needs ")[2])


@pytest.mark.parametrize(("ran_s", "said", "seconds"), [(20.0, "20 s", "20.0"), (None, "01:30", "90.0")])
def test_waiting_after_the_last_attempt_is_not_time_that_it_ran(
    daemon: FakeDaemon, ran_s: float | None, said: str, seconds: str
) -> None:
    """Ended while it waited for its next attempt; an older daemon does not say how long the newest one ran."""
    daemon.tasks = {1: finished(1, ran_s=ran_s)}
    assert lines("history", "--csv", "--no-header", "-o", "time") == [seconds]
    assert lines("history", "--no-header", "-o", "time")[0].strip() == said
    assert any(line.startswith("started") and line.endswith(f"(for {said})") for line in lines("show", "1"))


def test_a_running_tasks_time_is_its_attempts_and_a_waiting_ones_its_wait(daemon: FakeDaemon) -> None:
    ended = msgspec.structs.replace(running(2).attempts[0], ended_at=NOW - 30)
    waits = task_view(2, attempts=(ended,), started_at=NOW - 99, ran_s=69.0)
    daemon.tasks = {1: running(1, ran_s=42.0), 2: waits}
    assert [row.strip() for row in lines("queue", "--no-header", "-o", "time")] == ["42 s", "30 s"]


def test_the_time_of_a_retried_task_that_waits_counts_from_its_retry(daemon: FakeDaemon) -> None:
    before = msgspec.structs.replace(running(2).attempts[0], ended_at=NOW - 50)
    daemon.tasks = {2: task_view(2, attempts=(before,), started_at=NOW - 99, retried_at=NOW - 20, waited_s=20.0)}
    assert lines("queue", "--no-header", "-o", "time,waited") == ["20 s  20 s"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    columns = [Column("NAME", flexible=True), *(Column(f"FIGURE {place}", right=True) for place in range(9))]
    monkeypatch.setattr("sys.stdout", stream)
    print_table(columns, [["a-long-name-" * 9, *["123:45:67"] * 9]])
    return stream.getvalue().splitlines()


def test_in_a_pipe_figures_are_never_cut_and_names_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((80, 24)))
    head, row = printed(io.StringIO(), monkeypatch)
    assert head.endswith(" FIGURE 8")
    assert row.split() == ["a-long-name…", *["123:45:67"] * 9]
    assert len(printed(Terminal(), monkeypatch)[1]) <= 80
    monkeypatch.setenv("COLUMNS", "80")  # who says how wide it is gets that
    assert len(printed(io.StringIO(), monkeypatch)[1]) <= 80

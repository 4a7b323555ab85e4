"""A sentence for every event that there is; for everybody, or whole for the owner."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from carma.core.model import events as e
from carma.core.model.outcome import Cancelled, Disrupted, Failed, OutOfMemory, Succeeded, TimedOut
from carma.core.model.status import Ending, Finished
from carma.core.model.task import Plan, Task
from carma.core.model.values import (
    AttemptKey,
    Booking,
    Confinement,
    Estimate,
    GpuId,
    Guard,
    NoEstimate,
    Placement,
    TaskId,
    TaskSpec,
    tag_of,
)
from carma.daemon.views.story import as_on_record, sentence, story
from carma.testing.builders import ALICE, World, gpu
from tests.golden_text import assert_wording

TASK = TaskId(7)
KEY = AttemptKey(TASK, 2)
SPEC = TaskSpec(command=("python", "train.py", "--token=hunter2"), directory="/home/alice/secret")
ENDED = Task(id=TASK, owner=ALICE, spec=SPEC, submitted_at=1.0, status=Finished(2.0, Succeeded()))
BOOKED = Placement(gpus=(GpuId("GPU-1"),), booking=Booking(memory_mib=4_096, source="history", alone=True))
GPUS = {found.id: found for found in (gpu(0), gpu(1))}

EVENTS: list[e.Durable] = [
    e.TaskSubmitted(1.0, TASK, ALICE, SPEC, True),
    e.TaskEstimated(1.0, TASK, Estimate(footprint_mib=1, upper_mib=2_048, source="history")),
    e.TaskPlaced(1.0, KEY, BOOKED, "because"),
    e.AttemptStarted(1.0, KEY, 99),
    e.MemoryObserved(1.0, KEY, 512),
    e.BookingShrunk(1.0, KEY, 12_288, 9_626, 9_114),
    e.AttemptEnded(1.0, KEY, OutOfMemory("gpu", 1, 100, 200, "hunter2"), 300, None, (AttemptKey(TaskId(3), 1),)),
    e.RecoveryPlanned(1.0, TASK, Plan(rung="alone", memory_mib=None, reason="it goes alone"), 5.0),
    e.RecoveryDue(1.0, TASK),
    e.TaskFinished(1.0, TASK, Failed(3, "hunter2")),
    e.StopRequested(1.0, TASK, Cancelled("bob", "hunter2"), 10.0),
    e.TaskWarned(1.0, TASK, 10),
    e.PreemptionRequested(1.0, TASK, "bob", 10, 120.0, "hunter2", hold=True),
    e.PreemptionMissed(1.0, TASK),
    e.TaskPaused(1.0, TASK, "bob", "hunter2", until=61.0),
    e.TaskUnpaused(1.0, TASK, "bob", "hunter2"),
    e.IdleNoted(4_000.0, TASK, 400.0, "end"),
    e.IdleOver(4_000.0, TASK),
    e.NoticeDue(1.0, TASK),
    e.NoticeSent(1.0, TASK, "failure", 1.0, ("e-mail", "command"), ("webhook: hunter2",)),
    e.TaskHeld(1.0, TASK),
    e.TaskReleased(1.0, TASK),
    e.TaskRetried(1.0, TASK),
    e.TaskRestored(1.0, ENDED),
    e.TaskChanged(1.0, TASK, name="n", priority=-1, gpu_memory_mib=1_024, time_limit_s=60.0, comment="hunter2"),
    e.GpusFound(1.0, (gpu(0), gpu(1))),
    e.UseNoted(1.0, (e.AttemptUse(key=KEY, energy_j=5.0),)),
    e.GpuDrained(1.0, None, "fan"),
    e.GpuResumed(1.0, GpuId("GPU-1")),
]


def test_every_durable_event_is_here() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(e.Durable))


def test_every_event_is_a_sentence_that_every_user_may_read() -> None:
    sentences = {tag_of(event): sentence(event, GPUS) for event in EVENTS}
    assert "hunter2" not in repr(sentences)
    assert_wording("events", sentences)


def test_an_event_knows_its_task() -> None:
    assert {e.task_of(event) for event in EVENTS} == {TASK, None}


def test_the_story_for_the_owner_is_complete() -> None:
    events = [event for event in EVENTS if e.task_of(event) == TASK]
    whole = " ".join(line.text for line in story(events, GPUS, whole=True))
    assert "cancelled by bob: hunter2" in whole
    assert "failed with exit code 3: hunter2" in whole
    assert "because" in whole
    assert "comment 'hunter2'" in whole
    assert all(not line.text.startswith("task 7") for line in story(events, GPUS, whole=True))


NOT_ESTIMATED = e.TaskEstimated(1.0, TASK, None, (NoEstimate(source="history", reason="train.py never ran"),))
GROWTH = [e.MemoryObserved(float(at), KEY, mib, energy_j=float(at)) for at, mib in enumerate((512, 512, 600, 600))]
IN_TIME_SLICES = e.AttemptStarted(1.0, KEY, 99, Confinement(mechanism="timeslice", note="hunter2 says no"))
UNDER_MPS = e.AttemptStarted(
    1.0,
    KEY,
    99,
    Confinement(
        mechanism="mps",
        guards=(
            Guard(rung="mps", limit_mib=8_192, how="MPS's memory limit"),
            Guard(rung="watchdog", limit_mib=8_192),
        ),
    ),
)


def test_the_lines_of_a_story_have_the_accepted_wording() -> None:
    stories: dict[str, list[e.Durable]] = {
        "no estimate": [NOT_ESTIMATED],
        "placed on GPUs that the reason names too": [
            e.TaskPlaced(1.0, KEY, BOOKED, "placed on GPU 1: idle, 40 GiB free")
        ],
        "memory grew": [*GROWTH],
        "memory did not grow": [*GROWTH[:2]],
        "time limit near": [e.TaskWarned(4.0, TASK, 10)],
        "started under MPS": [UNDER_MPS],
        "started in time slices": [IN_TIME_SLICES],
    }
    lines = {name: [line.text for line in story(events, GPUS, whole=True)] for name, events in stories.items()}
    assert all(len(texts) == 1 for texts in lines.values())
    assert_wording("story", {name: texts[0] for name, texts in lines.items()})


def test_what_the_owner_reads_is_not_for_everyone() -> None:
    assert "train.py" not in sentence(NOT_ESTIMATED, GPUS)
    assert "hunter2" not in sentence(IN_TIME_SLICES, GPUS)


def test_consecutive_observations_of_memory_are_one_line_at_the_last_growth() -> None:
    (line,) = story(GROWTH, GPUS, whole=True)
    assert (line.at, re.findall(r"\d+ \w+", line.text)) == (2.0, ["512 MiB", "600 MiB", "2 s"])
    (line,) = story(GROWTH[:2], GPUS, whole=True)
    assert (line.at, re.findall(r"\d+ \w+", line.text)) == (0.0, ["512 MiB"])
    (line,) = story([e.MemoryObserved(5.1 + mib / 10_000, KEY, mib) for mib in (512, 600)], GPUS, whole=True)
    assert line.text.endswith(" 1 s"), "not in 0 s"


def test_observations_of_different_attempts_are_separate_lines() -> None:
    later = AttemptKey(TASK, 3)
    events: list[e.Durable] = [
        e.MemoryObserved(1.0, KEY, 512),
        e.MemoryObserved(2.0, KEY, 900),
        e.MemoryObserved(3.0, later, 300),
        e.TaskWarned(4.0, TASK, 10),
        e.MemoryObserved(5.0, later, 400),
    ]
    lines = [(line.at, re.findall(r"\d+", line.text)) for line in story(events, GPUS, whole=True)]
    assert lines == [(2.0, ["2", "512", "900", "1"]), (3.0, ["3", "300"]), (4.0, ["10"]), (5.0, ["3", "400"])]


WATCHDOG = OutOfMemory("gpu", 137, None, 9_216, "stopped by the watchdog: it held 9.0 GiB")
KILLED = Failed(137, "ended by SIGKILL")


@pytest.mark.parametrize(
    ("endings", "said"),
    [
        ((), "failed with exit code 137: ended by SIGKILL"),
        ((WATCHDOG,), "out of GPU memory, held 9.0 GiB"),
        ((TimedOut(60.0),), "reached its time limit of 60 s"),
        ((Disrupted("its MPS server ended"),), "disrupted: its MPS server ended"),
        ((Cancelled("bob"),), "cancelled by bob"),
        ((WATCHDOG, Cancelled("bob")), "cancelled by bob"),
        ((Cancelled("bob"), WATCHDOG), "cancelled by bob"),
    ],
)
def test_an_attempt_that_was_stopped_ended_by_that_and_not_by_the_signal(
    endings: tuple[Ending, ...], said: str
) -> None:
    """The same as the core has it on record, in the story and wherever the event is told by itself."""
    world = World(1)
    task = world.submit(5_000)
    world.settle()
    world.start(task)
    world.log.clear()
    for ending in endings:
        world.emit(e.StopRequested(world.now, task, ending, 5.0))
    world.end(task, KILLED)
    end = world.log[-1]
    assert isinstance(end, e.AttemptEnded)
    assert story(world.log, GPUS, whole=True)[-1].text == f"attempt 1: {said}"
    recorded = as_on_record(end, world.state.tasks)
    assert isinstance(recorded, e.AttemptEnded)
    assert recorded.outcome == world.task(task).attempts[0].outcome
    assert as_on_record(end, {}) == end, "a task that has left memory"


def test_a_stop_of_an_earlier_attempt_is_not_the_end_of_the_next() -> None:
    next_one = AttemptKey(TASK, 3)
    events: list[e.Durable] = [
        e.StopRequested(1.0, TASK, WATCHDOG, 0.0, 9),
        e.AttemptEnded(2.0, KEY, KILLED),
        e.StopRequested(3.0, TASK, Cancelled("bob"), 5.0),  # while it waited
        e.TaskRetried(4.0, TASK),
        e.TaskPlaced(5.0, next_one, BOOKED),
        e.AttemptEnded(6.0, next_one, Succeeded()),
    ]
    lines = [line.text for line in story(events, GPUS, whole=True)]
    assert "9.0 GiB" in lines[1]
    assert lines[-1].endswith("succeeded")


def test_a_gpu_that_is_gone_is_named_by_its_uuid() -> None:
    assert sentence(e.GpuResumed(1.0, GpuId("GPU-9")), GPUS).startswith("GPU GPU-9 ")


def test_a_stop_by_the_watchdog_a_lost_server_and_a_time_limit_have_different_sentences() -> None:
    stops: dict[str, Ending] = {
        "watchdog": OutOfMemory("gpu", 1, None, 9_216),
        "lost server": Disrupted("its MPS server ended"),
        "time limit": TimedOut(60.0),
    }
    sentences = {name: sentence(e.StopRequested(1.0, TASK, ending, 0.0, 9), GPUS) for name, ending in stops.items()}
    assert_wording("stops", sentences)

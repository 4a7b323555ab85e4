"""What the daemon's own log says, and how often."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from carma.core.model.events import AttemptEnded, Durable, GpuDrained, GpuResumed, StopRequested, TaskFinished
from carma.core.model.outcome import Cancelled, Disrupted, Failed, Lost, OutOfMemory, Succeeded
from carma.core.model.values import AttemptKey, GpuId, GpuSample, TaskId
from carma.daemon.daemon_log import ErrorLog, FaultLog, log_event
from carma.testing.builders import World

G1 = GpuId("GPU-1")
TASK = TaskId(7)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append((record.levelname, record.getMessage()))


@pytest.fixture
def lines() -> Iterator[list[tuple[str, str]]]:
    handler, logger = Lines(), logging.getLogger("carma.daemon")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler.told
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (GpuDrained(1.0, G1, "new fan"), "GPU 1 drained: new fan"),
        (GpuResumed(1.0, None), "the server takes new tasks again"),
        (TaskFinished(1.0, TASK, Lost("the machine restarted")), "task 7: finished: lost: the machine restarted"),
        (
            TaskFinished(1.0, TASK, OutOfMemory("gpu", 1, 2_048, None, "my own words")),
            "task 7: finished: out of GPU memory, requested 2.0 GiB more",
        ),
        (
            StopRequested(1.0, TASK, OutOfMemory("gpu", 1, None, 2_048, "my own words"), 0.0, 9),
            "task 7: stopped by the watchdog, to protect the memory that others have booked, with signal 9: "
            "out of GPU memory, held 2.0 GiB",
        ),
        (
            AttemptEnded(1.0, AttemptKey(TASK, 1), Disrupted("its MPS server ended")),
            "task 7: attempt 1: disrupted: its MPS server ended",
        ),
        (TaskFinished(1.0, TASK, Disrupted("MPS")), "task 7: finished: disrupted: MPS"),
        (StopRequested(1.0, TASK, Cancelled("bob"), 5.0), None),
        (TaskFinished(1.0, TASK, Failed(1, "my own words")), None),
        (AttemptEnded(1.0, AttemptKey(TASK, 1), Succeeded()), None),
    ],
)
def test_an_event_for_the_administrator_is_one_line(
    event: Durable, line: str | None, lines: list[tuple[str, str]]
) -> None:
    log_event(event, World(2).state)
    assert lines == ([] if line is None else [("INFO", line)])


def test_a_fault_is_logged_at_its_begin_and_at_its_end(lines: list[tuple[str, str]]) -> None:
    log, state = FaultLog(), World(2).state
    for fault in (None, "fell off the bus", "fell off the bus", None, None):
        log.observe((GpuSample(gpu=GpuId("GPU-0"), at=1.0), GpuSample(gpu=G1, at=1.0, fault=fault)), state)
    assert [line for _, line in lines] == ["GPU 1 cannot be used: fell off the bus", "GPU 1 can be used again"]


def test_an_error_that_repeats_is_logged_once_a_minute_with_a_count(lines: list[tuple[str, str]]) -> None:
    now_s = 0.0
    log = ErrorLog(60.0, lambda: now_s)
    for second in range(120):
        now_s = float(second)
        log.error("the disk is full", kind="store")
    log.over("store", "the disk takes more")
    log.over("store", "the disk takes more")
    assert lines == [
        ("ERROR", "the disk is full"),
        ("ERROR", "the disk is full (and 59 similar errors since the last such line)"),
        ("INFO", "the disk takes more, after 120 failures"),
    ]


def test_an_error_of_the_event_loop_that_repeats_is_one_line_a_minute(lines: list[tuple[str, str]]) -> None:
    now_s = 0.0
    handler = ErrorLog(60.0, lambda: now_s)
    full = {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many open files")}
    for tenth in range(1_200):
        now_s = tenth / 10
        handler(None, full)
    text = "socket.accept() out of system resource: OSError: [Errno 24] Too many open files"
    assert lines == [
        ("ERROR", text),
        ("ERROR", f"{text} (and 599 similar errors since the last such line)"),
    ]

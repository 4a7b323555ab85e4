"""The outcome of an attempt, judged from its exit record and the end of its output. Reads no files."""

from __future__ import annotations

import re
import signal
from typing import NamedTuple

import msgspec

from carma.core.model.outcome import Disrupted, Failed, LaunchFailed, Outcome, OutOfMemory, Succeeded
from carma.launch.failure_signs import find_mps_failure, find_oom, last_exception

# A program that runs out of memory exits or aborts. A program that was killed did not end by an OOM it printed before.
_OWN_ENDS = frozenset((signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP))
_KILLED_WORKER = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? [\d, ]+\) (?:is killed by signal: Killed|exited unexpectedly)"
)


class ExitRecord(msgspec.Struct, frozen=True):
    """exit.json. Unknown fields are ignored: a runner of another version may outlive an upgrade."""

    ended_at: float
    code: int | None = None
    signal: int | None = None
    message: str = ""  # why it did not start
    start_timeout_s: float | None = None  # it did not start within this time
    oom_kills: int | None = None  # by the kernel, in the same cgroup, while it ran
    stdout_tail: str | None = None  # the end of an output file that the submitter named; None for CARMA's own
    stderr_tail: str | None = None


class StopRecord(msgspec.Struct, frozen=True):
    """told.json: the first signal sent to end it, and when SIGKILL followed because that was not enough."""

    signal: int
    at: float = 0.0
    killed_at: float | None = None

    @property
    def killed(self) -> bool:
        return self.signal == signal.SIGKILL or self.killed_at is not None


class LastWords(NamedTuple):
    stderr: str
    stdout: str


class MpsState(NamedTuple):
    """Whether the attempt ran under one of our MPS servers, and whether that server ended meanwhile."""

    used: bool = False
    lost: bool = False


NO_MPS = MpsState()


def judge_exit(record: ExitRecord, words: LastWords, stop: StopRecord | None = None, mps: MpsState = NO_MPS) -> Outcome:
    """An OOM needs both: an end without success, and the framework's own message as the last exception (or, on the
    host, the kernel's count). The same holds for a failure of MPS, unless its server is known to have ended: clients
    then fail in different ways (an unspecific CUDA error, a bus error)."""
    if record.code == 0 and record.signal is None:
        return Succeeded()
    code = record.code if record.code is not None else 128 + (record.signal or 0)
    if record.start_timeout_s is not None:
        return LaunchFailed(record.message)
    if record.message:
        return Failed(code, record.message)
    if killed_for_memory(record, code, words):
        message = f"the kernel killed it because memory ran out ({name_of(signal.SIGKILL)})"
        return OutOfMemory(where="host", code=code, message=message)
    # Standard error decides if it contains an exception; some programs log theirs to standard output.
    text = words.stderr if last_exception(words.stderr) else words.stdout
    sign = find_oom(text) if ended_by_itself(code) else None
    if sign is not None:
        return OutOfMemory(sign.where, code, sign.asked_mib, sign.peak_mib, sign.message)
    failed = Failed(code, failure_message(record, words, stop))
    disrupted = mps_disruption(failed, text, mps) if mps.used and stop is None else None
    return disrupted or failed


def mps_disruption(failed: Failed, text: str, mps: MpsState) -> Disrupted | None:
    """The disruption of an attempt under one of our MPS servers that was not asked to end."""
    failure = find_mps_failure(text) if ended_by_itself(failed.code) else ""
    if failure:
        return Disrupted(f"MPS failed it: {failure}")
    if mps.lost:
        return Disrupted("its MPS server ended" + (f" ({failed.message})" if failed.message else ""))
    return None


def killed_for_memory(record: ExitRecord, code: int, words: LastWords) -> bool:
    """SIGKILL to it, to the command of its shell, or to a worker, while the kernel's count of OOM kills grew."""
    if not record.oom_kills or record.oom_kills < 0:
        return False
    return code == 128 + signal.SIGKILL or bool(_KILLED_WORKER.search(last_exception(words.stderr)))


def ended_by_itself(code: int) -> bool:
    """Whether no other process killed it. 128+N is also the code of a shell whose command was ended by signal N."""
    return not 128 < code < 128 + signal.NSIG or code - 128 in _OWN_ENDS


def failure_message(record: ExitRecord, words: LastWords, stop: StopRecord | None) -> str:
    killed_at = stop.killed_at if stop is not None else None
    if stop is not None and killed_at is not None and record.signal == signal.SIGKILL and killed_at <= record.ended_at:
        waited_s = round(max(0.0, killed_at - stop.at), 1)
        return f"killed with SIGKILL: it did not end within {waited_s:g} s after {name_of(stop.signal)}"
    if record.signal is not None:
        return f"ended by {name_of(record.signal)}"
    return last_exception(words.stderr) or last_exception(words.stdout) or _last_line(words.stderr)


def _last_line(text: str) -> str:
    """The last line of a program that did not end by an exception: usage errors, `No module named …`, messages of a
    shell."""
    lines = (line.strip() for line in reversed(text.splitlines()[-20:]))
    found = next((line for line in lines if line), "")
    return "".join(letter if letter.isprintable() else " " for letter in found)[:200]


def name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

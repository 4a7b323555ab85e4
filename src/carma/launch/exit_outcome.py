"""From an exit record and the program's last words to an Outcome. Reads nothing itself."""

from __future__ import annotations

import re
import signal
from typing import NamedTuple

import msgspec

from carma.core.model.outcome import Disrupted, Failed, LaunchFailed, Outcome, OutOfMemory, Succeeded
from carma.launch.mps_signs import find_mps_failure
from carma.launch.oom_signs import OomSign, find_oom, last_words

# A program that dies of an OOM exits by itself or aborts. One that was killed did not, whatever it had said before.
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
    duration_s: float = 0.0
    oom_kills: int | None = None  # by the kernel, in the same cgroup, while it ran
    pid: int | None = None
    started_at: float | None = None
    stdout_tail: str | None = None  # the end of an output file that the submitter named; None for CARMA's own
    stderr_tail: str | None = None


class Told(msgspec.Struct, frozen=True):
    """told.json: the first signal sent to end it, and when SIGKILL followed because that one did not."""

    signal: int
    at: float = 0.0
    killed_at: float | None = None


class LastWords(NamedTuple):
    stderr: str
    stdout: str


class Under(NamedTuple):
    """What it ran under: a server of MPS, and whether that one went while it ran."""

    mps: bool = False
    lost: bool = False


NOTHING = Under()


def judge_exit(record: ExitRecord, words: LastWords, told: Told | None = None, under: Under = NOTHING) -> Outcome:
    """OOM needs both: an end that was not success, and the framework's own message as the last exception (or, on the
    host, the kernel's count). So does a failure of MPS, unless its server is known to be gone: what clients say and do
    then differs (a hardly telling CUDA error, a bus error)."""
    if record.code == 0 and record.signal is None:
        return Succeeded()
    code = record.code if record.code is not None else 128 + (record.signal or 0)
    if record.start_timeout_s is not None:
        return LaunchFailed(record.message)
    if record.message:
        return Failed(code, record.message)
    if killed_for_memory(record, code, words):
        message = f"the kernel killed it for want of memory ({name_of(signal.SIGKILL)})"
        return OutOfMemory(where="host", code=code, message=message)
    sign = oom_sign(words) if spoke_for_itself(code) else None
    if sign is not None:
        return OutOfMemory(sign.where, code, sign.asked_mib, sign.peak_mib, sign.message)
    failed = Failed(code, failure_message(record, words, told))
    return (disruption(failed, words, under) if told is None else None) or failed


def disruption(failed: Failed, words: LastWords, under: Under) -> Disrupted | None:
    """Only for what ran under a server of ours and was not told to end."""
    if not under.mps:
        return None
    said = find_mps_failure(deciding_words(words)) if spoke_for_itself(failed.code) else ""
    if said:
        return Disrupted(f"MPS failed it: {said}")
    if under.lost:
        return Disrupted("the MPS server that it ran under ended" + (f" ({failed.message})" if failed.message else ""))
    return None


def killed_for_memory(record: ExitRecord, code: int, words: LastWords) -> bool:
    """SIGKILL (to it, or to what a shell ran for it) or a worker that was killed, and the kernel's count grew."""
    if not record.oom_kills or record.oom_kills < 0:
        return False
    return code == 128 + signal.SIGKILL or bool(_KILLED_WORKER.search(last_words(words.stderr)))


def spoke_for_itself(code: int) -> bool:
    """Not ended from outside; 128+N also when a shell passes on how its command ended."""
    return not 128 < code < 128 + signal.NSIG or code - 128 in _OWN_ENDS


def oom_sign(words: LastWords) -> OomSign | None:
    """Standard error decides when it holds an exception at all; some programs log theirs to standard output."""
    return find_oom(deciding_words(words))


def deciding_words(words: LastWords) -> str:
    return words.stderr if last_words(words.stderr) else words.stdout


def failure_message(record: ExitRecord, words: LastWords, told: Told | None) -> str:
    killed_at = told.killed_at if told is not None else None
    if told is not None and killed_at is not None and record.signal == signal.SIGKILL and killed_at <= record.ended_at:
        waited_s = round(max(0.0, killed_at - told.at), 1)
        return f"killed with SIGKILL: it did not end within {waited_s:g} s after {name_of(told.signal)}"
    if record.signal is not None:
        return f"ended by {name_of(record.signal)}"
    return last_words(words.stderr) or last_words(words.stdout) or _last_line(words.stderr)


def _last_line(text: str) -> str:
    """Of a program that did not end in an exception: usage errors, `No module named …`, a shell's complaint."""
    lines = (line.strip() for line in reversed(text.splitlines()[-20:]))
    found = next((line for line in lines if line), "")
    return "".join(letter if letter.isprintable() else " " for letter in found)[:200]


def name_of(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

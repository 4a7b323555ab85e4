"""Why a trial run gave no report, in a sentence that says what to do if something can be done."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, assert_never

from carma.core.model.values import NoEstimate
from carma.trial.protocol import Trial
from carma.trial.sandbox import Limits, Status

STEPS_NOTE = "steps"  # optimizer steps so far; there as soon as torch has been imported
Kind = Literal["crashed", "no_gpu", "time", "memory"]
NEVER = "it never used a GPU"  # as inside/carma_trial/report.py writes it
_AT_LIMIT, _TOO_LARGE = "the trial run was ended at its limit", "the trial run needed more than"
_NOT_STARTED, _EXITED, _KILLED = "the trial run could not start", "the command ended with", "the command was ended by"
_KINDS: dict[str, Kind] = {_AT_LIMIT: "time", _TOO_LARGE: "memory"}
_KINDS |= dict.fromkeys((_NOT_STARTED, _EXITED, _KILLED), "crashed")
# What only a trial run keeps from a command, or a flag that keeps CARMA out: the reason says itself what to do.
_OF_THE_BOX = re.compile("a trial run has no network|cannot be written in a trial run|keeps CARMA's part out")
_LAST_WORDS = 300  # characters
_ISOLATED = re.compile(r"-[A-Za-z]*[IE][A-Za-z]*")
_SWITCHES = Path("/proc/sys")


def reason_for(status: Status, command: Sequence[str], limits: Limits) -> str:
    """`status` of a run that left no report, or was ended before the report that counts."""
    reason = _ending(status, command, limits)
    if status.ended != "unanswered" and status.unanswered and status.ended not in ("refused", "failed"):
        reason += f"; {hangs(', '.join(status.unanswered[:3]))}, and was left out of the trial run"
    return reason


def hangs(path: str, limit_s: float | None = None) -> str:
    """The sentence for a file system that hangs."""
    within = "" if limit_s is None else f" within {limit_s:g} s"
    return f"{path} did not answer{within}; it may be on a network drive that hangs"


def _ending(status: Status, command: Sequence[str], limits: Limits) -> str:
    match status.ended:
        case "time":
            return f"{_AT_LIMIT} of {limits.seconds:g} s, {_how_far(status)}"
        case "memory":
            return f"{_TOO_LARGE} {limits.memory_mib} MiB of the host's memory, {_how_far(status)}"
        case "processes":
            return f"the trial run reached its limit of {limits.processes} processes and threads, {_how_far(status)}"
        case "not_started":
            return f"{_NOT_STARTED}: {status.why}"
        case "exit" | "awaited":
            return _left_early(status, command)
        case "refused":
            return f"trial runs need a sandbox, and the kernel does not allow one here ({status.why}). {advice()}"
        case "failed":
            return f"the sandbox of the trial run could not be built: {status.why}"
        case "unanswered":
            return hangs(status.why, status.limit_s)
        case "abandoned":
            return "the trial run was given up because CARMA is ending"
        case "lost":
            return "the trial run was killed from outside" + (f" ({status.why})" if status.why else "")
        case _:
            assert_never(status.ended)


def kind_of(ran: Trial | NoEstimate) -> Kind | None:
    """What sort of trouble a trial without a figure had, for who gives advice; None where none of it is known."""
    reason = ran.report.reason if isinstance(ran, Trial) else ran.reason
    if _OF_THE_BOX.search(reason):
        return None
    if isinstance(ran, NoEstimate):
        kind = next((kind for start, kind in _KINDS.items() if reason.startswith(start)), None)
        # A command that ended well did not crash: it only took too few steps.
        return None if reason.startswith(f"{_EXITED} exit code 0 ") else kind
    if reason == NEVER:
        return "no_gpu"
    return "crashed" if ran.report.stop == "error" else "time" if ran.report.stop == "limit" else None


def _how_far(status: Status) -> str:
    steps = status.notes.get(STEPS_NOTE) or ""
    if not steps.isdecimal():
        return "before it imported torch"
    if steps == "0":
        return "before its first optimizer step"
    return f"after {steps} optimizer step{'' if steps == '1' else 's'}"


def _left_early(status: Status, command: Sequence[str]) -> str:
    how = f"{_EXITED} exit code {status.code}"
    if status.code < 0:
        how = f"{_KILLED} {_signal_name(-status.code)}"
    seen = status.notes.get(STEPS_NOTE) is not None
    if seen or status.code != 0:
        reason = f"{how} {_how_far(status)}{_last_words(status)}"
    else:
        reason = "no Python with torch took part in the trial run (another framework, or a container?)"
    if not seen and (flag := isolating_flag(command)):
        reason += f"; Python's flag {flag} keeps CARMA's part out: leave it away for the estimate"
    if status.read_only and ("Read-only file system" in status.stderr or "Errno 30" in status.stderr):
        reason += f"; {', '.join(status.read_only[:3])} cannot be written in a trial run"
    return reason


def _last_words(status: Status) -> str:
    lines = [line.strip() for line in status.stderr.splitlines() if line.strip()]
    lines = lines or [line.strip() for line in status.stdout.splitlines() if line.strip()]
    if not lines:
        return ""
    last = lines[-1]
    return f": {last}" if len(last) <= _LAST_WORDS else f": {last[:_LAST_WORDS]}…"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def isolating_flag(command: Sequence[str]) -> str | None:
    """`python -I` and `-E` ignore PYTHONPATH. Flags end at the script, a `-m` or a `-c`."""
    for at, word in enumerate(command):
        if re.fullmatch(r"python[0-9.]*", os.path.basename(word)):
            for flag in command[at + 1 :]:
                if not flag.startswith("-") or flag in ("-m", "-c", "-"):
                    break
                if _ISOLATED.fullmatch(flag):
                    return flag
    return None


def advice(switches: Path = _SWITCHES) -> str:
    """What the administrator can change, by what the kernel tells of itself."""
    if os.geteuid() == 0:
        return "Root may not make namespaces here, as in most containers: run CARMA outside, or give it CAP_SYS_ADMIN."
    for name, closed, command in (
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
        ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
    ):
        try:
            if (switches / name).read_text().strip() == closed:
                return f"The administrator can allow it with `sysctl -w {command}`, or run CARMA's daemon as root."
        except OSError:
            continue
    return "Linux 5.12 or newer with user namespaces is needed, or a daemon that runs as root."

"""Why a trial run gave no report: a sentence that says what to do if something can be done, and its kind."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, assert_never

from msgspec.structs import replace

from carma.core.model.values import NoEstimate
from carma.trial.protocol import Trial
from carma.trial.report import TrialReport
from carma.trial.sandbox import SandboxLimits, SandboxStatus

SOURCE = "trace"
STEPS_NOTE = "steps"  # number of optimizer steps so far; the file exists once torch is imported
Kind = Literal["crashed", "no_gpu", "time", "no_torch", "memory"]
_LAST_WORDS = 300  # characters
_BARE_EXIT = re.compile(r"the script exited with code \d+ [^:]*")
_ISOLATED = re.compile(r"-[A-Za-z]*[IE][A-Za-z]*")
_SYSCTL = Path("/proc/sys")
_SWITCHES = (  # path, value that forbids user namespaces, setting that allows them
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
)


_HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # torch, of a request that the host cannot fulfil


class NoTrial(NoEstimate, frozen=True, kw_only=True):
    """A trial run without a report. `kind` is for advice; None where advice cannot depend on it."""

    source: str = SOURCE
    kind: Kind | None = None


def kind_of(ran: Trial | NoEstimate) -> Kind | None:
    """What kind of problem a trial run without a figure had."""
    if isinstance(ran, Trial):
        if ran.report.cause == "crashed" and _HOST_MEMORY in ran.report.reason:
            return "memory"
        return "crashed" if ran.report.cause == "crashed" else "no_gpu" if ran.report.cause == "no_gpu" else None
    return ran.kind if isinstance(ran, NoTrial) else None


def no_trial(status: SandboxStatus, command: Sequence[str], limits: SandboxLimits) -> NoTrial:
    """`status` of a run that left no report, or that ended before the report that counts."""
    reason, kind = _ending(status, command, limits)
    if status.unanswered and status.ended not in ("unanswered", "refused", "failed"):
        reason += f"; {no_answer(', '.join(status.unanswered[:3]))}, and was left out of the trial run"
    return NoTrial(reason=reason, kind=kind)


def no_answer(path: str, limit_s: float | None = None) -> str:
    """The sentence for a file system that does not answer."""
    within = "" if limit_s is None else f" within {limit_s:g} s"
    return f"{path} did not answer{within}; it may be on a network drive that hangs"


def _ending(status: SandboxStatus, command: Sequence[str], limits: SandboxLimits) -> tuple[str, Kind | None]:
    progress = _progress(status)
    match status.ended:
        case "time":
            kind: Kind = "no_torch" if status.notes.get(STEPS_NOTE) is None else "time"
            return f"the trial run reached its time limit of {limits.seconds:g} s, {progress}", kind
        case "memory":
            doubt = f" ({status.why})" if status.why else ""
            return f"the trial run needed more than {limits.memory_mib} MiB of host memory{doubt}, {progress}", "memory"
        case "processes":
            return f"the trial run reached its limit of {limits.processes} processes and threads, {progress}", None
        case "not_started":
            return f"the trial run could not start: {status.why}", "crashed"
        case "exit" | "awaited":
            return _early_exit(status, command)
        case "refused":
            needs = f"trial runs need a sandbox, which the kernel does not allow here ({status.why})"
            return f"{needs}. {advice()}", None
        case "failed":
            return f"the sandbox of the trial run could not be built: {status.why}", None
        case "unanswered":
            return no_answer(status.why, status.limit_s), None
        case "abandoned":
            return "the trial run was abandoned because CARMA is stopping", None
        case "lost":
            return "the trial run was killed from outside" + (f" ({status.why})" if status.why else ""), None
        case _:
            assert_never(status.ended)


def _progress(status: SandboxStatus) -> str:
    steps = status.notes.get(STEPS_NOTE) or ""
    if not steps.isdecimal():
        return "before it imported torch"
    if steps == "0":
        return "before its first optimizer step"
    return f"after {steps} optimizer step{'' if steps == '1' else 's'}"


def _early_exit(status: SandboxStatus, command: Sequence[str]) -> tuple[str, Kind | None]:
    imported = status.notes.get(STEPS_NOTE) is not None
    how = f"ended with exit code {status.code}" if status.code >= 0 else f"was ended by {_signal_name(-status.code)}"
    reason = f"the command {how} {_progress(status)}{_last_words(status)}"
    kind: Kind | None = "crashed" if status.code else None  # with exit code 0 it only took too few steps
    if not imported and status.code == 0:
        reason = "no Python process that CARMA can observe imported torch (another framework, or a container?)"
    if not imported and (flag := isolating_flag(command)):
        reason += f"; Python's flag {flag} disables CARMA's observation: omit it for the estimate"
        kind = None
    if status.read_only and ("Read-only file system" in status.stderr or "Errno 30" in status.stderr):
        reason += f"; {', '.join(status.read_only[:3])} cannot be written in a trial run"
        kind = None
    return reason, kind


def explained(report: TrialReport, status: SandboxStatus) -> TrialReport:
    """Adds the last line of the error output where a script that called `sys.exit` gave no reason itself."""
    if report.cause != "crashed" or not _BARE_EXIT.fullmatch(report.reason):
        return report
    return replace(report, reason=f"{report.reason}{_last_words(status)}")


def _last_words(status: SandboxStatus) -> str:
    """The last line of the error output, or of the output if there is no error output."""
    text = status.stderr.strip() or status.stdout.strip()
    if not text:
        return ""
    last = text.splitlines()[-1].strip()
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


def advice(sysctl: Path = _SYSCTL) -> str:
    """What the administrator can change so that the kernel allows sandboxes."""
    if os.geteuid() == 0:
        return "Root may not make namespaces here, as in most containers: run CARMA outside, or give it CAP_SYS_ADMIN."
    for name, closed, setting in _SWITCHES:
        try:
            if (sysctl / name).read_text().strip() == closed:
                return f"The administrator can allow it with `sysctl -w {setting}`, or run CARMA's daemon as root."
        except OSError:
            continue
    return "Linux 5.12 or newer with user namespaces is needed, or a daemon that runs as root."

"""Parsers of option values, most of them in Slurm's syntax. The message of a ValueError contains an example."""

from __future__ import annotations

import datetime
import re
import signal
import time
from typing import NamedTuple

from carma.core.model.units import parse_duration_s
from carma.core.model.values import Dependency, TaskId, WarnSignal

MAX_ARRAY_TASKS = 10_000
MAX_INDEX = 999_999_999
MAX_FACTOR = 100_000.0  # as in virtual.speed
_WHEN = {"afterok": "ok", "afterany": "any", "afternotok": "notok"}
_AHEAD = re.compile(r"^(?:now)?\+([0-9]+)\s*(s|sec|seconds?|m|min|minutes?|h|hours?|d|days?|)$")
_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}


def _is_number(text: str) -> bool:
    """ASCII digits only: full-width digits, for example, are typing mistakes."""
    return text.isascii() and text.isdigit()


class Array(NamedTuple):
    indices: tuple[int, ...]
    at_once: int | None


def parse_gres(text: str) -> int:
    """`gpu:2`, `gpu:a100:2`, `gpu`: a number of GPUs."""
    match = re.fullmatch(r"gpu(?::[A-Za-z][\w.-]*)?(?::([0-9]+))?", text.strip())
    if match is None or match[1] == "0":
        raise ValueError(f"{text!r} is not a number of GPUs; write for example gpu:2")
    return int(match[1] or 1)


def parse_gpus(text: str) -> int:
    """`2`, or Slurm's `a100:2`."""
    match = re.fullmatch(r"(?:[A-Za-z][\w.-]*:)?([0-9]{1,4})", text.strip())
    if match is None or int(match[1]) < 1:
        raise ValueError(f"{text!r} is not a number of GPUs; write for example 2")
    return int(match[1])


def parse_dependencies(text: str) -> tuple[Dependency, ...]:
    """`afterok:12`, `afterany:12:13`, or several with commas; `12` means afterok:12."""
    found: list[Dependency] = []
    for part in text.split(","):
        kind, _, ids = part.strip().rpartition(":") if _is_number(part.strip()) else part.strip().partition(":")
        when = _WHEN.get(kind or "afterok")
        numbers = ids.split(":")
        if when is None or not all(re.fullmatch(r"[0-9]{1,15}", number) for number in numbers):
            raise ValueError(
                f"{part!r} is not a dependency; write for example afterok:12, afterany:12:13 or afternotok:12"
            )
        found += [Dependency(TaskId(int(number)), when) for number in numbers]  # type: ignore[arg-type]
    return tuple(found)


def parse_array(text: str) -> Array:
    """`0-9`, `1,3,5`, `0-10:2`; `%3` at the end limits the array to three tasks at once."""
    body, percent, limit = text.strip().partition("%")
    wrong = ValueError(f"{text!r} is not an array; write for example 0-9, 1,3,5 or 0-9%3")
    if percent and (not _is_number(limit) or int(limit) < 1):
        raise wrong
    indices: dict[int, None] = {}
    for part in body.split(","):
        match = re.fullmatch(r"([0-9]{1,99})(?:-([0-9]{1,99})(?::([0-9]{1,99}))?)?", part.strip())
        if match is None or int(match[3] or 1) == 0:
            raise wrong
        first, last, stride = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if last < first:
            raise wrong
        if (last - first) // stride + 1 + len(indices) > MAX_ARRAY_TASKS:
            raise ValueError(f"{text!r} has more than {MAX_ARRAY_TASKS:,} tasks; submit it in several parts")
        if last > MAX_INDEX:
            raise ValueError(f"{text!r} has an index above the limit of {MAX_INDEX:,}")
        indices.update(dict.fromkeys(range(first, last + 1, stride)))
    return Array(tuple(indices), int(limit) if limit else None)


def parse_signal(text: str) -> int:
    """`TERM`, `SIGTERM`, `15`."""
    name = text.strip().upper()
    try:
        return int(signal.Signals(int(name)) if _is_number(name) else signal.Signals["SIG" + name.removeprefix("SIG")])
    except (KeyError, ValueError):
        raise ValueError(f"{text!r} is not a signal; write for example TERM, USR1 or 10") from None


def parse_warning(text: str) -> WarnSignal:
    """`USR1@60`: a signal, and the seconds before the time limit (default 60). Slurm's `B:` and `R:` have no effect."""
    body = re.sub(r"^[BR]+:", "", text.strip())
    name, _, before = body.partition("@")
    if before and not re.fullmatch(r"[0-9]{1,7}(\.[0-9]+)?", before):
        raise ValueError(f"{text!r} is not a signal with a time; write for example USR1@60")
    return WarnSignal(parse_signal(name), float(before or 60))


def parse_save_signal(text: str) -> int:
    """A signal that a program can handle."""
    number = parse_signal(text)
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"no program can handle {text!r}; write for example USR1")
    return number


def parse_begin(text: str, now: float | None = None) -> float:
    """`now+1hour`, `+30m`, `16:30`, `tomorrow`, `2026-01-31T16:30`: seconds since the epoch, in the local zone."""
    now = time.time() if now is None else now
    text = text.strip().lower()
    today = _midnight(now)
    if text == "now":
        return now
    if ahead := _AHEAD.match(text):
        return now + int(ahead[1]) * _UNIT_S[ahead[2][:1]]
    if text == "tomorrow":
        return (today + datetime.timedelta(days=1)).timestamp()
    try:
        if re.fullmatch(r"[0-9]{1,2}:[0-9]{2}(:[0-9]{2})?", text):
            clock = datetime.time.fromisoformat(text.zfill(5) if text.count(":") == 1 else text.zfill(8))
            moment = datetime.datetime.combine(today, clock)
            return (moment if moment.timestamp() > now else moment + datetime.timedelta(days=1)).timestamp()
        return datetime.datetime.fromisoformat(text.upper()).timestamp()
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text!r} is not a time; write for example now+1hour, 16:30, tomorrow or 2026-01-31T16:30"
        ) from None


def parse_past(text: str, now: float | None = None) -> float:
    """`2h` (ago), `today`, `2026-01-31`. Without `now` only the syntax is checked."""
    by = time.time() if now is None else now
    wrong = ValueError(f"{text!r} is not a time in the past; write for example 2h, 7d, today or 2026-01-31")
    word = text.strip().lower()
    try:
        if re.fullmatch(r"[0-9.]+\s*[smhd]", word):
            at = by - parse_duration_s(text)
        else:
            at = (_midnight(by) if word == "today" else datetime.datetime.fromisoformat(word.upper())).timestamp()
    except (ValueError, OverflowError):
        raise wrong from None
    if now is not None and at > now:
        raise wrong
    return at


def _midnight(now: float) -> datetime.datetime:
    """The beginning of the day, in the local zone."""
    return datetime.datetime.fromtimestamp(now).replace(hour=0, minute=0, second=0, microsecond=0)


def parse_text(text: str) -> str:
    """A name or a path."""
    if not text.strip():
        raise ValueError("the value is empty")
    return text


def parse_factor(text: str, least: float = 1e-6) -> float:
    """A factor: `60`, `0.5`."""
    try:
        factor = float(text) if text.isascii() else 0.0
    except ValueError:
        factor = 0.0
    if not least <= factor <= MAX_FACTOR:
        raise ValueError(f"{text!r} is not a factor between {least:g} and {MAX_FACTOR:,.0f}; write for example 60")
    return factor


def parse_grace(text: str) -> float:
    """A duration, which may be 0: `30` (seconds), `30s`, `5m`."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text.strip()):
        return parse_duration_s(text)
    seconds = float(text)
    if not seconds < 1e9:
        raise ValueError(f"{text!r} is not a number of seconds below 30 years")
    return seconds


def parse_export(text: str, environment: dict[str, str]) -> dict[str, str]:
    """`ALL`, `NONE`, `ALL,A=1`, `A,B=2`. The variables of a login (PATH, HOME, ...) are always kept."""
    items = [item for item in text.split(",") if item]
    kept: dict[str, str] = {
        name: environment[name] for name in ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG") if name in environment
    }
    if "ALL" in items:
        kept = dict(environment)
    for item in items:
        name, equals, value = item.partition("=")
        if item in ("ALL", "NONE"):
            continue
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"{item!r} is not a variable; write ALL, NONE, NAME or NAME=value, separated by commas")
        if equals:
            kept[name] = value
        elif name in environment:
            kept[name] = environment[name]
    return kept

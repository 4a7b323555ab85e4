"""Parses and formats sizes, durations and energies. A number without unit is MiB, or minutes (as in Slurm)."""

from __future__ import annotations

import re

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(?:([kmgt])(?:i?b)?)?\s*$", re.IGNORECASE | re.ASCII)
_TO_MIB = {"": 1.0, "k": 1 / 1024, "m": 1.0, "g": 1024.0, "t": 1024.0 * 1024.0}
_PARTS = re.compile(r"^(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?$", re.ASCII)
_SPAN = re.compile(r"^(\d+(?:\.\d+)?)\s*(s|m|h|d)$", re.ASCII)
_TO_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_mib(text: str) -> int:
    """`12GiB`, `12G`, `512M`, `4000`: MiB, rounded up. G and GiB both mean 1,024 MiB, as in Slurm."""
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; write for example 12GiB, 512M or 4000 (MiB)")
    mib = float(match[1]) * _TO_MIB[(match[2] or "").lower()]
    if not 0 < mib < 1e9:
        raise ValueError(f"{text!r} is not a size between 1 MiB and 1 PiB")
    return max(1, int(-(-mib // 1)))


def parse_duration_s(text: str) -> float:
    """Slurm's forms (minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS) and 90s, 15m, 2h, 1d."""
    text = text.strip().lower()
    if span := _SPAN.match(text):
        seconds = float(span[1]) * _TO_SECONDS[span[2]]
    elif parts := _PARTS.match(text):
        seconds = _clock_seconds(parts)
    else:
        raise ValueError(f"{text!r} is not a duration; write for example 00:10:00, 90s, 15m, 2h or 1-12:00:00")
    if not 0 < seconds < 1e9:
        raise ValueError(f"{text!r} is not a duration above zero and below 30 years")
    return seconds


def _clock_seconds(parts: re.Match[str]) -> float:
    days, first, second, third = (int(part) if part is not None else None for part in parts.groups())
    assert first is not None
    if days is not None:
        return days * 86400.0 + first * 3600.0 + (second or 0) * 60.0 + (third or 0)
    if second is None:
        return first * 60.0
    if third is None:
        return first * 60.0 + second
    return first * 3600.0 + second * 60.0 + third


def show_mib(mib: float | None) -> str:
    """`12.4 GiB`, `640 MiB`; `-` for None."""
    if mib is None:
        return "-"
    return f"{mib / 1024:.1f} GiB" if abs(mib) >= 1024 else f"{mib:.0f} MiB"


def show_pair_mib(one: float, other: float) -> tuple[str, str]:
    """Two figures to compare: in whole MiB if rounding would make them look equal."""
    shown = show_mib(one), show_mib(other)
    return shown if one == other or shown[0] != shown[1] else (f"{one:,.0f} MiB", f"{other:,.0f} MiB")


def show_count(count: int, noun: str) -> str:
    """`1 GPU`, `2 GPUs`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def show_j(joules: float | None, like: float | None = None) -> str:
    """`3.1 kWh`, `412 Wh`; joules below 1 Wh (`90 J`, `4.2 J`, `0 J`); `-` for None.

    Tasks of seconds use joules, which would be 0.0 in Wh. The rounded figure decides the unit, so that `1,000 Wh` does
    not appear; in a column, its largest figure `like` decides for all.
    """
    if joules is None:
        return "-"
    scale = joules if like is None else like
    hours = joules / 3600
    if round(scale / 3600) >= 1000:
        return f"{_rounded(hours / 1000, places=1)} kWh"
    if round(scale) >= 3600:
        return f"{_rounded(hours, places=0 if round(hours, 1) >= 100 else 1)} Wh"
    return f"{_rounded(joules, places=0 if round(joules, 1) >= 10 else 1)} J"


def _rounded(value: float, places: int) -> str:
    """`1,862`, `9.6`; one significant digit below 0.1, at most three places; `0`."""
    if abs(value) >= 0.1:
        return f"{value:,.{places}f}"
    return f"{round(value, 3):.1g}"


def show_s(seconds: float | None) -> str:
    """`1d 02:03:04`, `02:03:04`, `03:04`, `4 s`, `-`."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds + 0.5))
    days, rest = divmod(whole, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, secs = divmod(rest, 60)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{secs:02}"
    if hours:
        return f"{hours:02}:{minutes:02}:{secs:02}"
    return f"{minutes:02}:{secs:02}" if minutes else f"{secs} s"

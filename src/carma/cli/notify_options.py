"""Whom to notify of a task: `--notify` and `--notify-on`, or the file notify.toml of the user.

The file is read here, by the user's own process, and its contents become part of the submission.
"""

from __future__ import annotations

import os
import tomllib
from typing import Any, get_args

import msgspec

from carma.core.model.values import DEFAULT_NOTICES, NoticeKind, Notify, Record
from carma.errors import BadSettings, Usage
from carma.paths import find_paths

KINDS: tuple[NoticeKind, ...] = get_args(NoticeKind)
NONE = "none"


class NotifyFile(Record, frozen=True, kw_only=True):
    targets: tuple[str, ...] = ()
    on: tuple[NoticeKind, ...] = DEFAULT_NOTICES


def parse_kinds(text: str) -> tuple[NoticeKind, ...]:
    wanted = [part.strip() for part in text.split(",")]
    found = tuple(kind for kind in KINDS if kind in wanted or wanted == ["all"])
    if not found or (wanted != ["all"] and len(found) != len(wanted)):
        raise ValueError(f"{text!r} is not a list of events; they are {', '.join(KINDS)}, or all")
    return found


def notify_of(flags: dict[str, Any]) -> Notify | None:
    given: tuple[str, ...] = flags.get("notify", ())
    if given == (NONE,):
        return None
    file = _read_file()
    targets, on = given or file.targets, flags.get("notify_on", file.on)
    if not targets and "notify_on" in flags:
        raise Usage("--notify-on needs a target", "add for example --notify mailto:me@example.org")
    return Notify(targets=targets, on=on) if targets else None


def _read_file() -> NotifyFile:
    path = find_paths(os.environ).config_file.with_name("notify.toml")
    hint = 'for example: targets = ["mailto:me@example.org"]; --notify none submits without the file'
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), NotifyFile)
    except FileNotFoundError:
        return NotifyFile()
    except OSError as error:
        raise BadSettings(f"{path} cannot be read: {error.strerror}", hint) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise BadSettings(f"{path}: {error}", hint) from error

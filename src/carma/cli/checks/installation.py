"""Checks of CARMA itself: Python, its directory, its settings and its daemon."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from carma import __version__
from carma.cli.checks.doctor_facts import DoctorFacts, Finding, Verdict
from carma.cli.config import check_names, value_text
from carma.cli.connection import ask
from carma.client import Client
from carma.config import load_settings
from carma.core.model.units import show_count
from carma.errors import Unreachable
from carma.paths import check_directories, find_paths, find_socket, not_for_others
from carma.transport import has_listener

MIN_FREE_BYTES = 256 << 20
LOW_FREE_BYTES = 2 << 30
TIMEOUT_S = 10.0  # of the daemon's answer
MAX_NAMED = 6  # settings in one finding


def python(facts: DoctorFacts) -> Finding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    good = sys.version_info >= (3, 11)
    hint = "" if good else "install Python 3.11 or newer"
    text = f"{version} at {sys.executable}"
    closed = not_for_others(sys.executable) if os.geteuid() == 0 and facts.runs_as_root else ""
    if good and closed:
        text += (
            f"; other users cannot run this Python ({closed} is closed to them): the command line, and tasks with the "
            "python of this environment, fail for them"
        )
        return Finding("python", "warn", text, "install CARMA where all users may enter, for example in /opt/carma")
    return Finding("python", "ok" if good else "bad", text, hint)


def _nearest(directory: Path) -> Path:
    return next(path for path in (directory, *directory.parents) if os.path.exists(path))


def directory(facts: DoctorFacts) -> Finding:
    if server := facts.foreign_server:
        return Finding("directory", "ok", f"{server.home}, of the daemon of {server.user}")
    paths = find_paths(os.environ)
    check_directories(paths)
    place = paths.state_dir
    nearest = _nearest(place)
    if not os.access(nearest, os.W_OK):
        return Finding("directory", "bad", f"{place} is not writable", "set CARMA_HOME to a directory of yours")
    return Finding("directory", "ok", f"{place}" + ("" if nearest == place else " (created at the first start)"))


def disk(facts: DoctorFacts) -> Finding:
    server = facts.foreign_server
    nearest = _nearest(Path(server.home) if server else find_paths(os.environ).state_dir)
    free = shutil.disk_usage(nearest).free
    text = f"{free / 2**30:.1f} GiB free at {nearest}"
    if free < MIN_FREE_BYTES:
        return Finding("disk", "bad", text, "free some space: a full disk makes the daemon refuse submissions")
    return Finding("disk", "warn" if free < LOW_FREE_BYTES else "ok", text)


def settings(facts: DoctorFacts) -> Finding:
    if server := facts.foreign_server:
        return Finding("settings", "ok", f"those of the daemon of {server.user}: carma config show")
    paths = find_paths(os.environ)
    check_names(load_settings(paths, os.environ).settings)
    exists = paths.config_file.is_file()
    text = f"{paths.config_file}" if exists else f"{paths.config_file} does not exist"
    if differing := _differing(facts):
        shown = ", ".join(differing[:MAX_NAMED]) + (", …" if len(differing) > MAX_NAMED else "")
        hint = "`carma config show` lists its settings; a daemon started now without its flags has other ones"
        return Finding("settings", "ok", f"{text}; the running daemon differs: {shown}", hint)
    return Finding("settings", "ok", text if exists else f"{text}; defaults apply")


def admins(facts: DoctorFacts) -> Finding | None:
    """Administrators that are no users of this machine."""
    from carma.daemon.auth import unknown_users

    unknown = unknown_users(facts.setting("daemon.admins", []))
    if not unknown:
        return None
    text = f"daemon.admins names {', '.join(map(repr, unknown))}: there is no such user on this machine"
    return Finding("admins", "warn", text, "correct the setting and restart the daemon, or create the user", text)


def _differing(facts: DoctorFacts) -> list[str]:
    """Settings in which the running daemon differs from one started now: `sharing.caps = false (flag --set …)`."""
    following = facts.next_settings
    return [
        f"{name} = {value_text(line.value)} ({line.origin})"
        for name, line in facts.running_settings.items()
        if name in following and line.value != following[name]
    ]


def daemon(facts: DoctorFacts) -> Finding:
    try:
        server = ask(Client.server, TIMEOUT_S)
    except Unreachable as error:
        verdict: Verdict = "bad" if has_listener(find_socket(os.environ)) else "warn"
        return Finding("daemon", verdict, str(error), error.hint)
    text = (
        f"version {server.version}, pid {server.pid}, policy {server.policy}, "
        f"sharing {server.mechanism or 'unknown'}, {show_count(server.gpus, 'GPU')}, "
        f"{server.running} running, {server.queued} waiting"
    )
    if server.version != __version__:
        who = "" if facts.foreign_server is None else f"{server.user} restarts it: "
        return Finding("daemon", "warn", text, f"this command is {__version__}; {who}carma down, then carma up")
    if server.drained is not None:
        return Finding("daemon", "warn", f"{text}; drained: {server.drained}", "carma resume")
    return Finding("daemon", "ok", text)

"""The checks of what CARMA itself needs: Python, its directory, its settings, its daemon."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from carma import __version__
from carma.cli.checks.machine_facts import Finding, Look
from carma.cli.wording import many
from carma.errors import Unreachable

LEAST_FREE_BYTES = 256 << 20
LITTLE_FREE_BYTES = 2 << 30
PATIENT_S = 10.0  # for the daemon's answer
MOST_NAMED = 6  # settings, in one finding


def python(_look: Look) -> Finding:
    version = ".".join(str(part) for part in sys.version_info[:3])
    good = sys.version_info >= (3, 11)
    return Finding("python", "ok" if good else "bad", f"{version} at {sys.executable}", "" if good else "3.11 or newer")


def _nearest(directory: Path) -> Path:
    return next(path for path in (directory, *directory.parents) if os.path.exists(path))


def home(look: Look) -> Finding:
    from carma.paths import find_paths

    if server := look.elsewhere:
        return Finding("home", "ok", f"{server.home}, of the daemon that {server.user} runs")
    directory = find_paths(os.environ).state_dir
    nearest = _nearest(directory)
    if os.access(nearest, os.W_OK):
        return Finding("home", "ok", f"{directory}" + ("" if nearest == directory else " (made at the first start)"))
    hint = "set CARMA_HOME to a directory of yours"
    return Finding("home", "bad", f"{directory} cannot be written", hint)


def disk(look: Look) -> Finding:
    from carma.paths import find_paths

    server = look.elsewhere
    nearest = _nearest(Path(server.home) if server else find_paths(os.environ).state_dir)
    free = shutil.disk_usage(nearest).free
    text = f"{free / 2**30:.1f} GiB free at {nearest}"
    if free < LEAST_FREE_BYTES:
        return Finding("disk", "bad", text, "submissions are refused when the disk is full; make room")
    return Finding("disk", "warn" if free < LITTLE_FREE_BYTES else "ok", text)


def settings(look: Look) -> Finding:
    from carma.cli.config import check_names
    from carma.config import load_settings
    from carma.paths import find_paths

    if server := look.elsewhere:
        return Finding("settings", "ok", f"those of the daemon that {server.user} runs: carma config show")
    paths = find_paths(os.environ)
    check_names(load_settings(paths, os.environ).settings)
    text = f"{paths.config_file}" if paths.config_file.is_file() else f"{paths.config_file} is not there"
    if differing := _differing(look):
        shown = ", ".join(differing[:MOST_NAMED]) + (", …" if len(differing) > MOST_NAMED else "")
        hint = "carma config show has all of its settings; a daemon started now, without its flags, has other ones"
        return Finding("settings", "ok", f"{text}; the running daemon differs: {shown}", hint)
    return Finding("settings", "ok", text if paths.config_file.is_file() else f"{text}; the defaults hold")


def _differing(look: Look) -> list[str]:
    """What the running daemon has otherwise than one started now would: `sharing.caps = false (flag --set …)`."""
    from carma.cli.config import value_text

    return [
        f"{name} = {value_text(line.value)} ({line.origin})"
        for name, line in look.running_settings.items()
        if name in look.next_settings and line.value != look.next_settings[name]
    ]


def daemon(look: Look) -> Finding:
    from carma.cli.connection import connect
    from carma.paths import find_socket
    from carma.transport import somebody_listens

    try:
        with connect(PATIENT_S) as client:
            server = client.server()
    except Unreachable as error:
        if somebody_listens(find_socket(os.environ)):
            return Finding("daemon", "bad", str(error), error.hint)
        return Finding("daemon", "warn", str(error), "start one: carma up")
    text = (
        f"version {server.version}, pid {server.pid}, policy {server.policy}, "
        f"sharing {server.mechanism or 'not told'}, {many(server.gpus, 'GPU')}, "
        f"{server.running} running, {server.queued} waiting"
    )
    if server.version != __version__:
        who = "" if look.elsewhere is None else f"{server.user} restarts it: "
        return Finding("daemon", "warn", text, f"this command is {__version__}; {who}carma down, then carma up")
    if server.drained is not None:
        return Finding("daemon", "warn", f"{text}; drained: {server.drained}", "carma resume")
    return Finding("daemon", "ok", text)

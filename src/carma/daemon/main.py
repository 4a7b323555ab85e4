"""Starts the daemon: settings, directories, log, database. `carma up` calls `run`.

Heavy modules are imported after the process has gone to the background (server.py builds everything else).
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec.structs import replace

from carma.config import LoadedSettings, load_settings
from carma.daemon.startup import home_directory as home
from carma.paths import Paths, find_paths

# How long the event loop waits for the interpreter while another thread computes (Python's default: 5 ms).
SWITCH_INTERVAL_S = 0.0005


def run(
    flags: Mapping[str, object] | None = None,
    *,
    config: Path | None = None,
    detach: bool = False,
    new_database: bool = False,
    when_ready: Callable[[], None] = lambda: None,
) -> int:
    """Run the daemon until it is told to stop. Raises the error that keeps it from starting.

    `flags` are settings by dotted name; `config` replaces the usual settings file. With `detach` this returns 0 as
    soon as the daemon serves. Without it, `when_ready` is called at that moment; it must not wait for the daemon's
    answers. `new_database` renames the files of an existing database.
    """
    paths = find_paths(os.environ)
    if config is not None:
        paths = replace(paths, config_file=config)
    loaded = load_settings(paths, os.environ, flags)
    home.prepare(paths)
    if not detach:
        return _serve(paths, loaded, when_ready, new_database=new_database)
    from carma.daemon.startup.detach import in_background

    with home.os_errors_explained(paths):
        in_background(lambda ready: _serve(paths, loaded, ready, new_database=new_database), paths.daemon_log)
    return 0


def _serve(paths: Paths, loaded: LoadedSettings, ready: Callable[[], None], *, new_database: bool) -> int:
    home.start_logging(loaded.settings)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    from carma.daemon.server import serve
    from carma.store.sqlite import SqliteStore

    if not new_database:
        home.refuse_lost_database(paths)
    store = SqliteStore(paths.database, new=new_database)  # takes the lock: from here on there is no other daemon
    try:
        with home.os_errors_explained(paths), home.pid_file(paths.pid_file):
            return asyncio.run(serve(paths, loaded, store, ready))
    finally:
        store.close()

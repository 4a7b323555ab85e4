"""`carma up`: start the daemon."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import click
import msgspec

from carma.cli.completion_items import policy_items
from carma.cli.connection import connect
from carma.cli.error_output import note
from carma.cli.option_types import SIZE, Parsed, read_pairs, whole
from carma.cli.parsers import parse_factor
from carma.cli.verb import verb
from carma.config.load import FLAGS, load_settings
from carma.core.model.units import show_count, show_mib
from carma.errors import Usage
from carma.paths import SYSTEM_SOCKET, find_paths
from carma.transport import has_listener

EXAMPLES = """
carma up                                      this machine's GPUs, in the foreground
carma up --detach                             in the background; `carma down` stops it
carma up --virtual-gpus 4 --gpu-memory 40GiB --policy exclusive --detach
carma up --set gate.sm_active=0.7 --set recovery.retries=2
carma up --print-unit > /etc/systemd/system/carma.service
"""
POLICIES = "goodput, exclusive, round-robin, first-fit, best-fit, magm, lug, horus, lucid, or a plugin"


@verb("up", examples=EXAMPLES)
@click.option("--virtual-gpus", type=whole(1), metavar="N", help="Number of virtual GPUs to use.")
@click.option("--gpu-memory", type=SIZE, help="Memory of each virtual GPU (default 40GiB).")
@click.option(
    "--policy",
    metavar="NAME",
    shell_complete=policy_items,
    help=f"Placement policy (default goodput): {POLICIES}.",
)
@click.option("--speed", type=Parsed("X", parse_factor), help="Speed of virtual GPUs (default 1: real time).")
@click.option("--detach", "-d", is_flag=True, help="Run in the background; return when the daemon serves.")
@click.option("--config", "file", type=click.Path(path_type=Path), metavar="FILE", help="Settings file to use.")
@click.option("--set", "pairs", multiple=True, callback=read_pairs, metavar="NAME=VALUE", help="Setting; repeatable.")
@click.option("--log-level", metavar="LEVEL", help="Log level: debug, info (default), warning, error.")
@click.option(
    "--new-database", is_flag=True, help="Start with an empty database; keep the existing one as carma.db.old1."
)
@click.option("--print-unit", is_flag=True, help="Print a systemd unit; do not start the daemon.")
@click.option("--user", is_flag=True, help="With --print-unit: a unit for systemctl --user.")
def command(
    detach: bool,
    file: Path | None,
    pairs: dict[str, object],
    new_database: bool,
    print_unit: bool,
    user: bool,
    **named: object,
) -> int:
    """Start the daemon on this machine's GPUs, or on virtual GPUs."""
    options = {setting: named[flag.removeprefix("--").replace("-", "_")] for setting, flag in FLAGS.items()}
    given = {setting: value for setting, value in options.items() if value is not None}
    flags = {**pairs, **given}
    _check_settings(flags, file)
    if print_unit:
        if detach or new_database:
            raise Usage("--print-unit excludes --detach and --new-database", "leave out these flags: systemd starts it")
        _print_unit(user, flags, file)
        return 0
    if user:
        hint = "leave it out, or write: carma up --print-unit --user"
        raise Usage("--user selects the unit that --print-unit prints; it does not start a daemon", hint)
    from carma.daemon import main

    if not detach:
        greeting = threading.Thread(target=_greet, kwargs={"detached": False}, daemon=True)
        return main.run(flags, config=file, new_database=new_database, when_ready=greeting.start)
    code = main.run(flags, config=file, detach=True, new_database=new_database)
    _greet(detached=True)
    return code


def _check_settings(flags: dict[str, object], file: Path | None) -> None:
    """Raises for a wrong setting, and for a flag of virtual GPUs without virtual GPUs."""
    if file is not None and not file.is_file():
        raise Usage(f"there is no settings file {file}", "give the path of a TOML file, or leave out --config")
    paths = find_paths(os.environ)
    paths = paths if file is None else msgspec.structs.replace(paths, config_file=file)
    if load_settings(paths, os.environ, flags).settings.virtual.gpus:
        return
    for setting in ("virtual.speed", "virtual.gpu_memory_mib"):
        if setting in flags:
            raise Usage(
                f"{FLAGS.get(setting, setting)} applies to virtual GPUs only, and this daemon has none",
                "add for example --virtual-gpus 2, or leave the flag out",
            )


def _print_unit(user: bool, flags: dict[str, object], file: Path | None) -> None:
    """The unit starts the daemon with the same flags."""
    from carma.daemon.startup import systemd_unit

    words = [f"{FLAGS[name]}={value}" if name in FLAGS else f"--set={name}={value}" for name, value in flags.items()]
    words += [] if file is None else [f"--config={file.absolute()}"]
    click.echo(systemd_unit.text(user=user, arguments=words), nl=False)


def _kind(name: str, memory_mib: int) -> str:
    """The name with the memory, unless the name contains it."""
    gib = f"{memory_mib / 1024:.0f}"
    return name if f"{gib} GiB" in name or f"{gib}GB" in name else f"{name}, {show_mib(memory_mib)}"


def _greet(detached: bool) -> None:
    from carma.cli.checks import limitations
    from carma.cli.checks.doctor_facts import ServerFacts

    with connect() as client:
        server, gpus, limits = client.server(), client.gpus(), limitations(ServerFacts(client))
    paths = find_paths(os.environ)
    kinds = "; ".join(sorted({_kind(gpu.name, gpu.memory_mib) for gpu in gpus}))
    lines = [
        f"carma {server.version} is up: {show_count(len(gpus), 'GPU')} ({kinds}), policy {server.policy}, "
        f"pid {server.pid}",
        f"  socket  {paths.socket}",
        f"  log     {paths.daemon_log}" if detached else "",
        "  next    carma submit -- python train.py, then carma queue, carma gpus",
        f"  stop    carma down{'' if detached else ' or Ctrl-C'}; running tasks continue, the next start adopts them",
        *(f"  limit   {limit}" for limit in limits),
        "          `carma doctor` has the reasons and the remedies" if limits else "",
    ]
    click.echo("\n".join(line for line in lines if line))
    sys.stdout.flush()
    if paths.socket != SYSTEM_SOCKET and any(gpu.kind != "virtual" for gpu in gpus) and has_listener(SYSTEM_SOCKET):
        note(
            f"a daemon for all users manages the same GPUs ({SYSTEM_SOCKET}). The two daemons do not know of each "
            "other's bookings; `carma down` stops yours"
        )

"""`carma up`: the daemon, in front or in the background, or the systemd unit that runs it."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import click

from carma.cli.parsers import parse_factor
from carma.cli.setting_flag import pairs as read_pairs
from carma.cli.task_flags import Parsed
from carma.cli.verb import verb, whole
from carma.core.model.units import parse_mib
from carma.errors import Usage

EXAMPLES = """
carma up                                      this machine's GPUs, in the foreground
carma up --detach                             in the background; carma down ends it
carma up --virtual-gpus 4 --gpu-memory 40GiB --policy magm --detach
carma up --set gate.sm_active=0.7 --set recovery.retries=2
carma up --print-unit > /etc/systemd/system/carma.service
"""


@verb("up", examples=EXAMPLES)
@click.option("--virtual-gpus", type=whole(1), metavar="N", help="So many made-up GPUs; needs no real one.")
@click.option("--gpu-memory", type=Parsed("SIZE", parse_mib), help="Memory of each virtual GPU (40GiB).")
@click.option(
    "--policy",
    metavar="NAME",
    help="exclusive, round-robin, first-fit, best-fit, magm, lug, goodput, horus, lucid, or a plugin's.",
)
@click.option("--speed", type=Parsed("X", parse_factor), help="Virtual GPUs run so many times faster than real time.")
@click.option("--detach", "-d", is_flag=True, help="In the background; returns when it serves.")
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Settings from this file in place of the usual one.",
)
@click.option(
    "--set", "pairs", multiple=True, callback=read_pairs, metavar="NAME=VALUE", help="One setting; repeat it."
)
@click.option("--log-level", metavar="LEVEL", help="debug, info, warning, error.")
@click.option(
    "--new-database",
    is_flag=True,
    help="Start with an empty database; the files of an existing one are kept as carma.db.old1.",
)
@click.option("--print-unit", is_flag=True, help="Print a systemd unit and do nothing else.")
@click.option("--user", is_flag=True, help="With --print-unit: one for systemctl --user.")
def command(
    virtual_gpus: int | None,
    gpu_memory: int | None,
    policy: str | None,
    speed: float | None,
    detach: bool,
    file: Path | None,
    pairs: dict[str, object],
    log_level: str | None,
    new_database: bool,
    print_unit: bool,
    user: bool,
) -> int:
    """Start the daemon on this machine's GPUs, or on virtual ones."""
    if print_unit:
        return _print_unit(user)
    named = {
        "virtual.gpus": virtual_gpus,
        "virtual.gpu_memory_mib": gpu_memory,
        "virtual.speed": speed,
        "placement.policy": policy,
        "daemon.log_level": log_level,
    }
    flags = {**pairs, **{k: v for k, v in named.items() if v is not None}}
    if file is not None and not file.is_file():
        raise Usage(f"there is no settings file {file}", "carma config check FILE looks at one")
    from carma.daemon import main

    if not detach:
        greet = threading.Thread(target=_say_hello, kwargs={"detached": False}, daemon=True)
        return main.run(flags, config=file, new_database=new_database, when_ready=greet.start)
    code = main.run(flags, config=file, detach=True, new_database=new_database)
    _say_hello(detached=True)
    return code


def _print_unit(user: bool) -> int:
    from carma.daemon.startup import systemd_unit as unit

    click.echo(unit.text(user=user), nl=False)
    return 0


def _kind(name: str, memory_mib: int) -> str:
    """A name that tells the size says it well enough."""
    from carma.core.model.units import show_mib

    told = f"{memory_mib / 1024:.0f}"
    return name if f"{told} GiB" in name or f"{told}GB" in name else f"{name}, {show_mib(memory_mib)}"


def _say_hello(detached: bool) -> None:
    from carma.cli.checks import limitations
    from carma.cli.checks.machine_facts import ServedLook
    from carma.cli.connection import connect
    from carma.paths import find_paths

    with connect() as client:
        server, gpus, limits = client.server(), client.gpus(), limitations(ServedLook(client))
    paths = find_paths(os.environ)
    kinds = sorted({_kind(gpu.name, gpu.memory_mib) for gpu in gpus})
    many = f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}"
    lines = [
        f"carma {server.version} is up: {many} ({'; '.join(kinds)}), policy {server.policy}, pid {server.pid}",
        f"  socket  {paths.socket}",
        f"  log     {paths.daemon_log}" if detached else "",
        "  next    carma submit -- python train.py, then carma queue, carma gpus",
        f"  end     carma down{'' if detached else ' or Ctrl-C'}; running tasks go on, the next start adopts them",
        *(f"  limit   {limit}" for limit in limits),
        "          `carma doctor` says why, and what to do" if limits else "",
    ]
    click.echo("\n".join(line for line in lines if line))
    sys.stdout.flush()

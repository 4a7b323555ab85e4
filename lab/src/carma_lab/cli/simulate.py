"""`carma simulate`: a trace on simulated GPUs, through the core of the daemon."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from carma.cli.completion_items import policy_items
from carma.cli.option_types import number, read_pairs, whole
from carma.cli.verb import verb
from carma.errors import Usage
from carma_lab.cli.progress_line import check_run_file, simulating
from gpumemnet.cli.output_file_option import STDOUT, file_flag, force_flag, say_written

EXAMPLES = """
carma simulate --trace t1 --policy goodput
carma simulate --trace mix --policy exclusive,goodput,magm
carma simulate --trace heavy --policy lug --memory none --set gate.enabled=no --json
carma simulate --trace ./my-trace.csv --gpus 8 --gpu h200 --out run.json
carma simulate --fidelity real.json --solo exclusive.json
"""
DEMANDS = ("measured", "history", "estimate", "none")  # equal to carma_lab.simulator.setup, which is slow to import
WITH_FIDELITY = ("fidelity", "solo", "noise", "seed", "out", "force", "as_json")


@verb("simulate", examples=EXAMPLES)
@click.option("--trace", metavar="NAME", default="t1", help="Trace: t1, t2, mix, heavy, or a CSV file (t1).")
@click.option(
    "--policy",
    metavar="NAMES",
    default="goodput",
    shell_complete=policy_items,
    help="Policy, or several separated by commas (goodput).",
)
@click.option("--gpus", type=whole(1, 65_536), default=4, metavar="N", help="Number of GPUs (4).")
@click.option("--gpu", metavar="CARD", default="a100-40", help="Card: a100-40, a100-80 or h200 (a100-40).")
@click.option(
    "--memory",
    metavar="SOURCE",
    default="measured",
    help="Source of memory estimates: measured, none, horus, faketensor, gpumemnet, trace (measured).",
)
@click.option(
    "--demand",
    type=click.Choice(DEMANDS),
    default="measured",
    help="Knowledge of demand and run time before a task runs (measured).",
)
@click.option("--mechanism", type=click.Choice(["mps", "timeslice"]), default="mps", help="Sharing mechanism (mps).")
@click.option("--seed", type=whole(0), default=0, metavar="N", help="Seed of all random choices (0).")
@click.option(
    "--noise",
    type=number(0.0, 1.0),
    default=0.0,
    metavar="X",
    help="Spread of true rates about the sharing model, 0 to 1; 1: as measured (0).",
)
@click.option(
    "--set", "settings", multiple=True, callback=read_pairs, metavar="NAME=VALUE", help="A setting (repeatable)."
)
@file_flag("--out", "File for the whole run, for carma run-report; - for standard output.")
@force_flag
@click.option(
    "--fidelity",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Simulate a recorded run, and print the simulator's errors.",
)
@click.option(
    "--solo",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --fidelity: tasks alone, by name; a table of tasks, or a run in which they ran alone.",
)
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON; a list for several policies.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    policy: str,
    settings: dict[str, object],
    out: str | None,
    force: bool,
    fidelity: Path | None,
    solo: Path | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Simulate a trace under a policy: makespan, waiting, slowdown, OOMs, energy.

    Starts no process and needs no GPU: a virtual clock drives the decisions of the daemon.

    With --fidelity, a recorded run (carma run-report --save) is simulated with its own arrivals, policy, settings and
    GPUs, and both are compared. docs/simulation.md describes the method and its accuracy.
    """
    if out is not None:
        _check_out(out, force, as_json)
    if fidelity is not None:
        from carma_lab.cli.simulate_view import compare

        compare(fidelity, solo, out, noise=given["noise"], seed=given["seed"], typed=_others(ctx), as_json=as_json)
        return 0
    if solo is not None:
        raise Usage("--solo needs --fidelity", "Example: --fidelity real.json --solo exclusive.json")
    import msgspec

    from carma_lab.cli.simulate_view import show_figures
    from carma_lab.runs.record import write
    from carma_lab.simulator.request import Request, recorded, simulation
    from carma_lab.simulator.simulated_cards import find

    names = tuple(dict.fromkeys(word.strip() for word in policy.split(",") if word.strip()))
    if not names:
        raise Usage("--policy names no policy", "Example: --policy goodput; carma up --help lists the policies.")
    if out is not None and len(names) > 1:
        raise Usage(
            "--out takes one run, and --policy names several policies",
            "Name one policy, or run the command once for each.",
        )
    found = {}
    with simulating(quiet=as_json or out == STDOUT) as follow:
        for name in names:
            request = msgspec.convert({**given, "policy": name, "settings": settings}, Request)
            on_progress = None if follow is None else functools.partial(follow, f"{Path(request.trace).name} {name}")
            if out is None:
                found[name] = simulation(request).run(on_progress)
            else:
                run = recorded(request, on_progress=on_progress)
                write(run, out)
                found[name] = run.figures
    if out != STDOUT:
        on = f"{given['gpus']} x {find(given['gpu']).name}, {given['mechanism']}"
        show_figures(str(given["trace"]), on, found, as_json=as_json)
    say_written(out)
    return 0


def _check_out(out: str, force: bool, as_json: bool) -> None:
    if out == STDOUT and as_json:
        raise Usage(
            "--out - and --json both write to standard output", "Omit one of them; the run includes the figures."
        )
    check_run_file(out, force, simulated=True)


def _others(ctx: click.Context) -> tuple[str, ...]:
    """The given options that cannot be combined with --fidelity."""
    return tuple(
        option.opts[0]
        for option in ctx.command.params
        if option.name not in WITH_FIDELITY
        and ctx.get_parameter_source(option.name or "") is not ParameterSource.DEFAULT
    )

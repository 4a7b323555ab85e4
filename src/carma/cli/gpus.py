"""`carma gpus`: GPUs with their tasks, memory, activity and state."""

from __future__ import annotations

import click

from carma.cli.connection import ask
from carma.cli.output import Column, Field, Remark, print_json, print_remarked
from carma.cli.verb import Listing, table_flags, verb
from carma.cli.watch import watch_flag
from carma.cli.wording import percent, slowdown_text
from carma.client import Client
from carma.core.model.units import show_count
from carma.wire.api_types import GpuView

METRICS = {
    "gpm": "activity from NVML's GPM",
    "dcgm": "activity from DCGM",
    "inferred": "activity inferred from power and utilisation, which is less exact; `carma doctor` explains the effect",
    "processes": "SM activity from the utilisation of processes; no occupancy, no DRAM activity",
    "nvml": "coarse utilisation only, no SM activity; `carma doctor` explains the effect",
}
EXAMPLES = """
carma gpus
carma gpus -w
carma gpus --watch 5
carma gpus --json
"""


def name_of(gpu: GpuView) -> str:
    return gpu.name.removeprefix("NVIDIA ")


def _task(gpu: GpuView, task: int) -> str:
    if task in gpu.paused:
        return f"{task} paused"
    return f"{task} idle" if task in gpu.idle_tasks else str(task)


def _tasks(gpu: GpuView) -> str:
    tasks = ",".join(_task(gpu, task) for task in gpu.tasks) or "-"
    return tasks + (f" +{len(gpu.foreign)} foreign" if gpu.foreign else "")


def _memory(gpu: GpuView) -> str:
    used = "-" if gpu.used_mib is None else f"{gpu.used_mib / 1024:.1f}"
    return f"{used}/{gpu.booked_mib / 1024:.1f}/{gpu.memory_mib / 1024:.1f}"


def _slowdowns(gpu: GpuView) -> str:
    """`12:1.24,13:~1.1`: of each task whose slowdown is known."""
    known = [f"{task}:{slowdown_text(one)}" for task, one in gpu.progress.items() if one.slowdown is not None]
    return ",".join(known) or "-"


NAME: Field[GpuView] = (Column("NAME", flexible=True, most=20), name_of)
FIELDS: tuple[Field[GpuView], ...] = (
    (Column("GPU", right=True), lambda gpu: str(gpu.index)),
    (Column("UUID"), lambda gpu: gpu.gpu),
    NAME,
    (Column("TASKS", flexible=True, most=16), _tasks),
    (Column("MEMORY GiB", right=True), _memory),
    (Column("SM", right=True), lambda gpu: percent(gpu.sm_active)),
    (Column("OCC", right=True), lambda gpu: percent(gpu.sm_occupancy)),
    (Column("DRAM", right=True), lambda gpu: percent(gpu.dram_active)),
    (Column("GRACT", right=True), lambda gpu: percent(gpu.gr_active)),
    (Column("TENSOR", right=True), lambda gpu: percent(gpu.tensor_active)),
    (Column("METRICS"), lambda gpu: gpu.metrics or "-"),
    (Column("SLOWDOWN"), _slowdowns),
    (Column("W", right=True), lambda gpu: "-" if gpu.power_w is None else f"{gpu.power_w:.0f}"),
)
WIDE_ONLY = ("UUID", "GRACT", "TENSOR", "METRICS", "SLOWDOWN")


@verb("gpus", examples=EXAMPLES)
@table_flags
@watch_flag
def command(listing: Listing) -> None:
    """GPUs with their tasks, memory, activity, power and state.

    MEMORY is used/booked/total. W is the power in watts. SM, OCC and DRAM are means over the window, in percent; a
    dash is a metric that the GPU does not provide. The line above the table has the name of all GPUs if they are
    equal. --wide adds the names and UUIDs, GRACT (any kernel active), TENSOR (tensor cores active), METRICS, the source
    of activity: gpm, dcgm, inferred (from power and utilisation), processes or nvml, and SLOWDOWN, the time taken /
    time alone of each task; ~: inferred from activity.
    """
    gpus = ask(Client.gpus)
    if listing.as_json:
        return print_json(gpus)
    if not gpus and listing.header:
        return click.echo("the daemon has found no GPU; `carma doctor` looks for the cause", err=True)
    return _print(gpus, listing.header, listing.wide)


def _print(gpus: list[GpuView], header: bool, wide: bool) -> None:
    named = wide or len({gpu.name for gpu in gpus}) > 1 or not header
    if header and not named:
        click.echo(f"{show_count(len(gpus), 'GPU')}: {name_of(gpus[0])}" + _source(gpus))
    fields = [field for field in FIELDS if (named or field is not NAME) and (wide or field[0].title not in WIDE_ONLY)]
    columns = [*(column for column, _ in fields), Column("STATE", flexible=True, state=True)]
    rows = [[text(gpu) for _, text in fields] for gpu in gpus]
    print_remarked(columns, rows, [_state(gpu) for gpu in gpus], header, wide)


def _source(gpus: list[GpuView]) -> str:
    """The source of activity, if all GPUs have the same."""
    sources = {gpu.metrics for gpu in gpus}
    about = METRICS.get(sources.pop(), "") if len(sources) == 1 else ""
    return f"; {about}" if about else ""


def _state(gpu: GpuView) -> Remark:
    """`drained: fan to be replaced`: the reason without a repetition of the state."""
    reason = gpu.reason.removeprefix("is ").removeprefix("cannot be used: ").replace(" is warming up: ", ": ")
    return Remark(gpu.state, "" if reason == gpu.state else reason.removeprefix(f"{gpu.state}: "))

"""`carma gpus`: one line a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from carma.cli.verb import table_flags, verb
from carma.cli.wording import percent
from carma.wire.api_types import GpuView

if TYPE_CHECKING:
    from carma.cli.output import Remark

METRICS = {
    "gpm": "activity from NVML's GPM",
    "dcgm": "activity from DCGM",
    "processes": "SM activity by the processes' own utilisation; no occupancy, no DRAM",
    "nvml": "coarse utilisation only, no SM activity: carma doctor says what that costs",
}
EXAMPLES = """
carma gpus
carma gpus -w
carma gpus --json
"""


@verb("gpus", examples=EXAMPLES)
@table_flags
def command(as_json: bool, no_header: bool, wide: bool) -> None:
    """The GPUs: tasks on each, memory, activity, power, and whether it takes tasks.

    MEMORY is what is used, what is booked for tasks, and all there is. W is the power in watts.
    The GPUs' name stands above the table when all have the same; --wide gives each its name and UUID, GRACT (any
    kernel ran), TENSOR (tensor cores) and METRICS: where activity comes from (gpm, dcgm, processes, nvml).
    SM, OCC and DRAM are means over the window, in percent; a dash is a metric that the GPU does not give.
    """
    from carma.cli.connection import connect

    with connect() as client:
        gpus = client.gpus()
    if as_json:
        from carma.cli.output import print_json

        return print_json(gpus)
    if not gpus and not no_header:
        click.echo("the daemon has found no GPU; carma doctor looks for the cause", err=True)
        return None
    return _table(gpus, header=not no_header, wide=wide)


def _table(gpus: list[GpuView], *, header: bool, wide: bool) -> None:
    from carma.cli.output import Column, print_remarked

    names = {gpu.name for gpu in gpus}
    named = wide or len(names) > 1 or not header
    if header and not named:
        click.echo(f"{len(gpus)} GPU{'' if len(gpus) == 1 else 's'}: {_name(gpus[0])}" + _origin(gpus))
    columns = [
        Column("GPU", right=True),
        *([Column("UUID")] if wide else []),
        *([Column("NAME", flexible=True, most=20)] if named else []),
        Column("TASKS", flexible=True, most=16),
        Column("MEMORY GiB", right=True),
        Column("SM", right=True),
        Column("OCC", right=True),
        Column("DRAM", right=True),
        *([Column("GRACT", right=True), Column("TENSOR", right=True), Column("METRICS")] if wide else []),
        Column("W", right=True),
        Column("STATE", flexible=True, state=True),
    ]
    rows = [
        [str(gpu.index), *([gpu.gpu] if wide else []), *([_name(gpu)] if named else []), *_figures(gpu, wide)]
        for gpu in gpus
    ]
    print_remarked(columns, rows, [_state(gpu) for gpu in gpus], header, wide)


def _name(gpu: GpuView) -> str:
    return gpu.name.removeprefix("NVIDIA ")


def _origin(gpus: list[GpuView]) -> str:
    """Where activity comes from, when it is one source for all; for people who know the GPU and not the driver."""
    sources = {gpu.metrics for gpu in gpus}
    about = METRICS.get(sources.pop(), "") if len(sources) == 1 else ""
    return f"; {about}" if about else ""


def _figures(gpu: GpuView, wide: bool) -> list[str]:
    tasks = ",".join(str(task) for task in gpu.tasks) or "-"
    if gpu.foreign:
        tasks += f" +{len(gpu.foreign)} foreign"
    used = "-" if gpu.used_mib is None else f"{gpu.used_mib / 1024:.1f}"
    return [
        tasks,
        f"{used}/{gpu.booked_mib / 1024:.1f}/{gpu.memory_mib / 1024:.1f}",
        percent(gpu.sm_active),
        percent(gpu.sm_occupancy),
        percent(gpu.dram_active),
        *([percent(gpu.gr_active), percent(gpu.tensor_active), gpu.metrics or "-"] if wide else []),
        "-" if gpu.power_w is None else f"{gpu.power_w:.0f}",
    ]


def _state(gpu: GpuView) -> Remark:
    """`drained: fan to be replaced`: the reason without what the state says already."""
    from carma.cli.output import Remark

    reason = gpu.reason.removeprefix("is ").removeprefix("cannot be used: ").replace(" is warming up: ", ": ")
    if reason == gpu.state:
        return Remark(gpu.state)
    return Remark(gpu.state, reason.removeprefix(f"{gpu.state}: "))

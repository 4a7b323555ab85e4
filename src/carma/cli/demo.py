"""`carma demo`: compare exclusive and shared GPUs on virtual GPUs."""

from __future__ import annotations

import click

from carma.cli.option_types import SIZE, Parsed, whole
from carma.cli.parsers import parse_factor
from carma.cli.verb import verb

EXAMPLES = """
carma demo
carma demo --policy lug --speed 240
carma demo --trace ./my-trace.csv --json
"""


@verb("demo", examples=EXAMPLES)
@click.option("--trace", metavar="NAME", help="Trace to replay: t1 (default), t2, mix, heavy, or a file.")
@click.option("--speed", type=Parsed("X", lambda text: parse_factor(text, 1.0)), help="Speed-up of time (default 480).")
@click.option("--policy", metavar="NAME", help="Policy of the collocated run (default magm).")
@click.option("--virtual-gpus", "gpus", type=whole(1, 64), metavar="N", help="Number of virtual GPUs (default 4).")
@click.option("--gpu-memory", "gpu_memory_mib", type=SIZE, help="Memory of each (default 40GiB).")
@click.option("--keep", is_flag=True, help="Keep the directories of the private daemons.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, without a live view.")
def command(keep: bool, as_json: bool, **given: str | float | int | None) -> int:
    """Compare exclusive and shared GPUs on a 60-task trace, with real processes on virtual GPUs.

    The shared GPUs use the policy magm, as in the published results; --policy goodput uses the daemon's default.
    The demo starts two private daemons in temporary directories and removes them at the end. It needs no GPU.

    With the default speed-up one real second is eight minutes of the trace. The daemons therefore sample every 0.15 s,
    and their windows and warm-up times are longer, so that a window holds several samples.
    """
    import msgspec

    from carma.demo import comparison

    chosen = {name: value for name, value in given.items() if value is not None}
    return comparison.run(msgspec.convert({**chosen, "keep": keep, "json": as_json}, comparison.Options))

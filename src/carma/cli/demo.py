"""`carma demo`: the product in a minute, on virtual GPUs."""

from __future__ import annotations

import click

from carma.cli.parsers import parse_factor
from carma.cli.task_flags import Parsed
from carma.cli.verb import verb, whole
from carma.core.model.units import parse_mib

EXAMPLES = """
carma demo
carma demo --policy lug --speed 240
carma demo --trace ./my-trace.csv --json
"""


@verb("demo", examples=EXAMPLES)
@click.option("--trace", metavar="NAME", help="A shipped trace's name, or a file.")
@click.option(
    "--speed", type=Parsed("X", lambda text: parse_factor(text, 1.0)), help="So many times faster than real time."
)
@click.option("--policy", metavar="NAME", help="The policy that collocates (magm).")
@click.option("--virtual-gpus", "gpus", type=whole(1, 64), metavar="N", help="How many GPUs (4).")
@click.option("--gpu-memory", "gpu_memory_mib", type=Parsed("SIZE", parse_mib), help="Memory of each (40GiB).")
@click.option("--keep", is_flag=True, help="Keep the private daemons' directories.")
@click.option("--json", "as_json", is_flag=True, help="The result as JSON, no live view.")
def command(keep: bool, as_json: bool, **given: str | float | int | None) -> int:
    """A 60-task trace as real processes on virtual GPUs, with exclusive GPUs and with collocation.

    It uses private daemons in a temporary directory and leaves nothing behind. No GPU is needed.

    At such a speed a real second is minutes: the demo's daemons sample every 0.15 s, and their windows and warm-up are
    stretched so that a window holds a few samples.
    """
    import msgspec

    from carma.demo import demo

    chosen = {name: value for name, value in given.items() if value is not None}
    return demo.run(msgspec.convert({**chosen, "keep": keep, "json": as_json}, demo.Options))

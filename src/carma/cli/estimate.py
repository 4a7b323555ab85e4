"""`carma estimate`: the GPU memory of a command, without a daemon and without a GPU."""

from __future__ import annotations

import click

from carma.cli.option_types import Parsed, duration, number, whole
from carma.cli.verb import AFTER_DASHES, Renamed, command_verb, command_words

# As in carma.trial.layers.description, whose import would delay the help.
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad", "nadam", "radam", "adamax", "adadelta")
PRECISIONS = ("fp32", "tf32", "bf16-amp", "fp16-amp", "bf16")
ATTENTIONS = ("sdpa", "eager")
EXAMPLES = """
carma estimate -- python train.py --batch-size 64
carma estimate --gpu a100-40gb -- python train.py
carma estimate --compare -- python train.py
carma estimate --summary resnet50.txt --batch 32 --precision bf16-amp
carma estimate --summary printed.txt --input 3x224x224 --batch 64
carma estimate --json -- torchrun --nproc-per-node 2 train.py
"""


def _shape(text: str) -> tuple[int, ...]:
    """`3x224x224`, `128`; also with commas or ×."""
    sizes = text.replace("×", "x").replace(",", "x").lower().split("x")
    if not all(size.strip().isascii() and size.strip().isdecimal() and 0 < int(size) < 10**9 for size in sizes):
        raise ValueError(f"{text!r} is not a shape; write for example 3x224x224 for an image, 128 for words")
    return tuple(int(size) for size in sizes)


@command_verb("estimate", examples=EXAMPLES)
@command_words
@click.option("--estimator", metavar="NAME", help="Estimator to use (default: the best that answers).")
@click.option(
    "--gpu", metavar="GPU", help="Model (h200, a100-40gb), or index or UUID of a GPU here (default: the first)."
)
@click.option(
    "-G",
    "--gpus",
    "count",
    cls=Renamed,
    was=("--gpu-count",),
    type=whole(1, 64),
    default=1,
    help="Number of GPUs (default 1).",
)
@click.option("--steps", type=whole(2, 100), help="Number of optimizer steps in the trial run (default 3).")
@click.option("--limit", "limit_s", type=duration(1), help="Time limit of the trial run (default 120s).")
@click.option("--level", type=number(0.5, 0.9999), help="Probability that the bound holds (default 0.99).")
@click.option("--compare", is_flag=True, help="Ask all estimators; they share one trial run.")
@click.option(
    "--summary", metavar="FILE", help="Model summary (torchinfo, torchsummary, print, Keras, ONNX); -: stdin."
)
@click.option("--batch", type=whole(1, 10**9), help="Batch size, with --summary.")
@click.option(
    "--input", "sample", type=Parsed("SHAPE", _shape), help="Shape of one sample: 3x224x224, 128; with --summary."
)
@click.option(
    "--optimizer", type=click.Choice(OPTIMIZERS, case_sensitive=False), help="Optimizer, with --summary (default adam)."
)
@click.option("--precision", type=click.Choice(PRECISIONS), help="Precision, with --summary (default fp32).")
@click.option("--checkpointing", is_flag=True, help="Gradient checkpointing, with --summary.")
@click.option("--channels-last", is_flag=True, help="Channels-last memory format, with --summary.")
@click.option(
    "--attention", type=click.Choice(ATTENTIONS), help="Attention implementation, with --summary (default sdpa)."
)
@click.option(
    "--heads", type=whole(1, 10**6), help="Number of attention heads, with --attention eager (default width / 64)."
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    as_json: bool,
    **flags: str | float | int | bool | tuple[int, ...] | None,
) -> int:
    """Estimate the GPU memory of a command, without a GPU, a daemon or a change to the command.

    The command runs for three optimizer steps on an emulated GPU. It has no network, its files are discarded, and the
    time limit stops it. Exit code 1 if there is no estimate.
    """
    import msgspec

    from carma.cli import estimate_view as view
    from carma.cli.estimate_request import Options, question

    after: tuple[str, ...] | None = ctx.meta.get(AFTER_DASHES)
    given = (*words, "--", *after) if words and after is not None else words or after or ()
    options = msgspec.convert({**flags, "command": given}, Options)
    asked = question(options)
    with view.progress(asked.request):
        found = asked.answers()
    view.print_found(found, asked.request, as_json=as_json, compare=options.compare)
    return 0 if any(view.is_estimate(answer) for answer in found) else 1

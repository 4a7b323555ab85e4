"""`carma estimate`: how much memory a command will take, without a daemon and without a GPU."""

from __future__ import annotations

import click

from carma.cli import parsers as parse
from carma.cli.task_flags import AFTER_DASHES, Parsed, SubmitVerb
from carma.cli.verb import Renamed, number, verb, whole

# As in carma.trial.layers.description, which is not imported for help.
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


def _limit(text: str) -> float:
    seconds = parse.parse_grace(text)
    if seconds < 1:
        raise ValueError(f"{text!r} is not a time of at least one second; write for example 120s or 5m")
    return seconds


def _shape(text: str) -> tuple[int, ...]:
    """`3x224x224`, `128`; also with commas or ×."""
    sizes = text.replace("×", "x").replace(",", "x").lower().split("x")
    if not all(size.strip().isascii() and size.strip().isdecimal() and 0 < int(size) < 10**9 for size in sizes):
        raise ValueError(f"{text!r} is not a shape; write for example 3x224x224 for an image, 128 for words")
    return tuple(int(size) for size in sizes)


@verb("estimate", cls=SubmitVerb, examples=EXAMPLES, context_settings={"allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[--] COMMAND...")
@click.option("--estimator", metavar="NAME", help="Who is asked (the best that answers).")
@click.option("--gpu", metavar="GPU", help="For which: h200, a100-40gb; index or UUID of one that is here (the first).")
@click.option(
    "-G", "--gpus", "count", cls=Renamed, was=("--gpu-count",), type=whole(1, 64), default=1,
    help="On so many GPUs (1).",
)  # fmt: skip
@click.option("--steps", type=whole(2, 100), help="Optimizer steps of the trial run (3).")
@click.option("--limit", "limit_s", type=Parsed("TIME", _limit), help="Ends the trial run: 90s, 5m (120s).")
@click.option("--level", type=number(0.5, 0.9999), help="How surely the bound is to hold (0.99).")
@click.option("--compare", is_flag=True, help="Ask every estimator; one trial run for all.")
@click.option("--summary", metavar="FILE", help="A model: torchinfo, torchsummary, print, Keras, ONNX; - is stdin.")
@click.option("--batch", type=whole(1, 10**9), help="The summary's model is trained with so many samples at once.")
@click.option(
    "--input", "sample", type=Parsed("SHAPE", _shape), help="One sample, where the summary has none: 3x224x224, 128."
)
@click.option("--optimizer", type=click.Choice(OPTIMIZERS, case_sensitive=False), help="That trains it (adam).")
@click.option("--precision", type=click.Choice(PRECISIONS), help="In which it is trained (fp32).")
@click.option("--checkpointing", is_flag=True, help="It is trained with gradient checkpointing.")
@click.option("--channels-last", is_flag=True, help="It is trained with its images' channels last in memory.")
@click.option("--attention", type=click.Choice(ATTENTIONS), help="By torch's function, or its scores written out.")
@click.option("--heads", type=whole(1, 10**6), help="Of its attention layers, for --attention eager (width / 64).")
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    as_json: bool,
    **flags: str | float | int | bool | tuple[int, ...] | None,
) -> int:
    """How much GPU memory a command will take. Needs no GPU, no daemon and no change to the command.

    The command runs for three optimizer steps with a GPU that is made up. What it writes is thrown away, it has no
    network, and it ends at the limit. Exit code 1 where there is no estimate, with the reason.
    """
    import msgspec

    from carma.cli import estimate_view as view
    from carma.cli.estimate_request import Options, question

    after: tuple[str, ...] | None = ctx.meta.get(AFTER_DASHES)
    given = (*words, "--", *after) if words and after is not None else words or after or ()
    options = msgspec.convert({**flags, "command": given}, Options)
    asked = question(options)
    with view.working(asked.request, quiet=as_json):
        found = asked.answers()
    view.print_found(found, asked.request, as_json=as_json, compare=options.compare)
    return 0 if any(view.is_estimate(answer) for answer in found) else 1

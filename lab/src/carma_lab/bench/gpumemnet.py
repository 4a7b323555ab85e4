"""`carma bench gpumemnet`: how long GPUMemNet takes, from a summary's text to a figure. It measures and prints only.

*parser*: the text of a summary as a description. *inference*: a description as a figure, all of it: the features, the
check that they lie inside what was learned, one run of the model, one description at a time. *session*: of that, the
run alone. Beside them stands what was published: the parser's time for a CNN's and for GPT2-XL's text, and one run of
either kind of model for a batch of 128 on a GPU (itu-rad/GPUMemNet).

The texts in `texts/` are what torchinfo 1.8 and `print` show of torchvision 0.28's ResNet-50 and of GPT2-XL as in
transformers 5.17.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path

from msgspec.structs import replace

from carma.core.model.values import Record
from carma.demo.figures import percentile
from carma.errors import Usage
from carma.trial.layers.description import Described, Layer
from carma_lab.bench.machine import Machine, facts, time_ms
from carma_lab.bench.results_file import check_place, command_of, print_table, say, write
from gpumemnet import FAMILIES, Family
from gpumemnet.serving.features import features
from gpumemnet.serving.limits import inside, offences
from gpumemnet.serving.model import THREADS, Model, check_runtime, load
from gpumemnet.serving.model_facts import SHIPPED, Kind
from gpumemnet.summaries import read_text

TEXTS = Path(__file__).parent / "texts"
LIMIT_MS = 2.0  # what is aimed at, for the parser and for inference each
WARM = 20
HINT = "--models names a directory that carma train --out wrote."
KINDS: tuple[Kind, ...] = ("mlp", "transformer")
PARSED = {
    "resnet50.torchinfo.txt": (0.99, 0.99),
    "gpt2-xl.torchinfo.txt": (1.77, 1.77),
    "gpt2-xl.print.txt": (1.77, 1.77),
}
INFERRED: dict[Kind, tuple[float, float]] = {"mlp": (2.25, 2.40), "transformer": (10.6, 10.7)}


class Options(Record, frozen=True, kw_only=True):
    out: str | None = None
    runs: int = 400
    models: str | None = None


class Timing(Record, frozen=True, kw_only=True):
    """Repeated calls of one thing, in milliseconds."""

    part: str  # "parser", "inference", "session"
    of: str  # the text, or the family and the kind of the model
    layers: int
    median_ms: float
    p95_ms: float
    published_ms: tuple[float, float] | None = None  # least and most

    @property
    def is_within(self) -> bool:
        return self.median_ms <= LIMIT_MS


class Report(Record, frozen=True, kw_only=True):
    """What the file holds."""

    command: str
    machine: Machine
    versions: dict[str, str]
    threads: int  # of onnxruntime
    runs: int
    limit_ms: float
    timings: tuple[Timing, ...]
    skipped: tuple[str, ...] = ()


def run(options: Options) -> int:
    check_place(options.out)
    check_runtime()
    machine = facts()
    folder = SHIPPED if options.models is None else Path(options.models)
    models = _models(folder)
    timings = list(_parser(options.runs))
    for model in filter(None, models.values()):
        timings += _of_model(model, options.runs)
    report = Report(
        command=command_of("gpumemnet", options),
        machine=machine,
        versions={name: version(name) for name in ("onnxruntime", "numpy")},
        threads=THREADS,
        runs=options.runs,
        limit_ms=LIMIT_MS,
        timings=tuple(timings),
        skipped=tuple(f"{name}: there is no such model in {folder}" for name, model in models.items() if model is None),
    )
    if options.out != "-":
        show(report)
    write(report, options.out)
    return 0


def _models(folder: Path) -> dict[str, Model | None]:
    """Every family and kind; None where the folder has no such model."""
    if not folder.is_dir():
        raise Usage(f"{folder} is no directory of models", HINT)
    models = {f"{family}-{kind}": load(family, kind, "", (folder,)) for family in FAMILIES for kind in KINDS}
    if not any(models.values()):
        raise Usage(f"there is no model in {folder}", HINT)
    return models


def show(report: Report) -> None:
    columns = ("what", "layers", "median", "p95", "published", f"within {report.limit_ms:g} ms")
    title = f"GPUMemNet on {report.machine.cpu}, {report.runs} runs each; one sample at a time"
    print_table(title, columns, map(_line, report.timings))
    for reason in report.skipped:
        say(reason)


def _line(timing: Timing) -> tuple[str, ...]:
    known = timing.published_ms
    published = "-" if known is None else "–".join(f"{one:g}" for one in dict.fromkeys(known)) + " ms"
    return (
        f"{timing.part}, {timing.of}",
        str(timing.layers),
        f"{timing.median_ms:.2f} ms",
        f"{timing.p95_ms:.2f} ms",
        published,
        "yes" if timing.is_within else "no",
    )


def _parser(runs: int) -> Iterator[Timing]:
    for name, published in PARSED.items():
        text = (TEXTS / name).read_text(encoding="utf-8")
        layers = len(_read(name).layers)
        yield _timed("parser", name, layers, partial(read_text, text, batch=2), runs, published)


def _of_model(model: Model, runs: int) -> Iterator[Timing]:
    described = _asked(model.facts.family)
    of, kind = f"{model.facts.family}, {model.facts.kind}-based", model.facts.kind
    fed = inside(features(described), model.facts)

    def infer() -> None:
        found = features(described)
        offences(found, model.facts)
        model.quantiles_mib(inside(found, model.facts))

    count = len(described.layers)
    yield _timed("inference", of, count, infer, runs, INFERRED[kind])
    yield _timed("session", of, count, lambda: model.quantiles_mib(fed), runs, INFERRED[kind])


def _timed(
    part: str, of: str, layers: int, call: Callable[[], object], runs: int, published: tuple[float, float]
) -> Timing:
    spans_ms = [time_ms(call) for _ in range(WARM + runs)][WARM:]
    return Timing(
        part=part,
        of=of,
        layers=layers,
        median_ms=round(percentile(spans_ms, 50), 4),
        p95_ms=round(percentile(spans_ms, 95), 4),
        published_ms=published,
    )


def _asked(family: Family) -> Described:
    """A model of the family as large as people train them."""
    match family:
        case "mlp":
            return _perceptron()
        case "cnn":
            return replace(_read("resnet50.torchinfo.txt"), input=(32, 3, 224, 224), optimizer_slots=2)
        case "transformer":
            return replace(_read("gpt2-xl.torchinfo.txt"), input=(2, 1024), optimizer_slots=2)


def _read(name: str) -> Described:
    return read_text((TEXTS / name).read_text(encoding="utf-8")).described


def _perceptron(batch: int = 256, width: int = 2048, depth: int = 10) -> Described:
    block = (
        Layer(kind="Linear", output=(batch, width), parameters=width * (width + 1)),
        Layer(kind="BatchNorm1d", output=(batch, width), parameters=2 * width),
        Layer(kind="ReLU", output=(batch, width)),
        Layer(kind="Dropout", output=(batch, width)),
    )
    layers = (*(block * depth), Layer(kind="Linear", output=(batch, 1000), parameters=1000 * (width + 1)))
    return Described(layers=layers, batch=batch, input=(batch, width), optimizer="Adam", optimizer_slots=2)

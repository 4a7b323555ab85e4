"""Learns cuDNN's workspaces of convolutions from measured rows, and prints its errors for nets that it has not seen.

    python -m lab.tools.fit_workspaces ROWS.jsonl… [--check] [--without FAMILY…] [--out FILE]

ROWS are lines as `carma calibrate` and the measuring of a card write them. Without `--check` it writes the file that is
shipped (`src/carma/trial/data/`); with it, every family of nets (`source` in a row) is predicted by a model that was
fitted without that family's shapes. Needs scikit-learn; about five minutes.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np  # type: ignore[import-not-found,unused-ignore]
from sklearn.ensemble import (  # type: ignore[import-not-found,unused-ignore]
    ExtraTreesClassifier,
    RandomForestRegressor,
)

from carma.trial.replay.conv_formulas import MORE, NONE, OTHER, formula_bytes
from carma.trial.replay.conv_shapes import ConvShape, features, of_row, scratch_bytes, tensor_bytes
from carma.trial.replay.conv_workspaces import SHIPPED, ConvModel, DecisionTree, LearntChoice

MIB = 1 << 20
SLACK_BYTES = 2048  # an engine's own pointers; the allocator's granularity is of that order
MORE_BYTES = 36 * MIB  # the most that split reductions were seen to hold
NEAR = 0.05
TREES = 12
# The formulas that are tried, in this order.
PADS = (1, 4, 8, 16, 32, 64)
COPIES = ("xyw", "xy", "xw", "yw", "x", "y", "w", "W", "xyW", "XYW", "XY", "X", "Y", "Xy", "xY")
TRANSFORMS = ("winograd", "fft32", "fft", "fftw")
NAMES: tuple[str, ...] = (
    NONE,
    *(f"{letters}@{pad}" for pad in PADS for letters in COPIES),
    "sums",
    "xy@1+sums",
    *(name for transform in TRANSFORMS for name in (transform, f"xyw@1+{transform}")),
    "columns",
    "columns1",
    "offsets",
)
# Formulas to which a remainder may be added.
WITH_MORE: tuple[str, ...] = (
    NONE,
    *(f"xyw@{pad}" for pad in PADS),
    "xy@1",
    *(f"{letters}@{pad}" for pad in (4, 8) for letters in ("xw", "yw")),
)


class Sample(NamedTuple):
    source: str
    shape: ConvShape
    scratch_bytes: int
    formula: str
    rest_bytes: int


class Samples(NamedTuple):
    calls: list[Sample]
    trials: list[Sample]  # of `cudnn.benchmark`


def read(files: Iterable[Path]) -> Samples:
    """A row with `benchmark` says what the trial took; where it was seen again later, `settled_bytes` says the rest."""
    found = Samples([], [])
    for file in files:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        for line in data.splitlines():
            row = json.loads(line)
            shape = of_row(row)
            if shape is None:
                continue
            size = scratch_bytes(row)
            (found.trials if shape.benchmark else found.calls).append(_sample(row, shape, size))
            if "settled_bytes" in row:
                found.calls.append(_sample(row, shape, row["settled_bytes"]))
    return found


def _sample(row: dict[str, Any], shape: ConvShape, size: int) -> Sample:
    return Sample(str(row["source"]), shape, size, *explain(shape, size))


def explain(shape: ConvShape, size: int) -> tuple[str, int]:
    """The first formula that hits, and what it leaves; otherwise the nearest below with a remainder on top."""
    if size <= SLACK_BYTES:
        return NONE, size
    for name in NAMES:
        if _possible(name, shape) and 0 <= size - formula_bytes(name, shape) <= max(SLACK_BYTES, 64 * shape.groups):
            return name, size - formula_bytes(name, shape)
    rests = [(size - formula_bytes(name, shape), name) for name in WITH_MORE]
    rest, name = min(((rest, name) for rest, name in rests if 0 <= rest <= MORE_BYTES), default=(size, OTHER))
    return (name, rest) if name == OTHER else (f"{name}+{MORE}", rest)


def _possible(name: str, shape: ConvShape) -> bool:
    if any(name.endswith(transform) for transform in TRANSFORMS):
        return len(shape.stride) == 2 and max(shape.stride) == 1 and (max(shape.weight[2:]) > 1 or shape.benchmark)
    widened = "@" in name and name != name.lower()
    return not (widened and shape.item_bytes == 4)


def fit(samples: Samples, gpu: str, torch: str, cudnn: str) -> ConvModel:
    """Model of a card and the versions under which the rows were measured."""
    calls, trials = learn(samples.calls), learn(samples.trials)
    rows = len(samples.calls) + len(samples.trials)
    return ConvModel(gpu=gpu, torch=torch, cudnn=cudnn, rows=rows, call=calls, trial=trials)


def learn(samples: Sequence[Sample]) -> LearntChoice:
    asked = np.array([features(sample.shape) for sample in samples], float)
    names = [sample.formula for sample in samples]
    often = Counter(names)
    formulas = tuple(sorted(often, key=lambda name: (-often[name], name)))
    place = {name: index for index, name in enumerate(formulas)}
    # A wrong engine for a small tensor costs nothing.
    weight = [log2(2 + max(sample.scratch_bytes, tensor_bytes(sample.shape)) / MIB) for sample in samples]
    forest = ExtraTreesClassifier(TREES, max_features=0.8, n_jobs=2, random_state=0)
    forest.fit(asked, [place[name] for name in names], sample_weight=weight)
    more = [index for index, name in enumerate(names) if name.endswith(MORE)]
    other = [index for index, name in enumerate(names) if name == OTHER]
    learnt = LearntChoice(
        formulas=formulas,
        choose=tuple(_tree(each.tree_, forest.classes_) for each in forest.estimators_),
        more=_regression(asked[more], [log2(max(1, samples[index].rest_bytes)) for index in more]),
        other=_regression(
            asked[other], [log2(samples[index].rest_bytes / tensor_bytes(samples[index].shape)) for index in other]
        ),
    )
    # Shapes that were measured and that the trees get wrong all the same are kept as they are.
    sizes = ((sample.shape, sample.scratch_bytes) for sample in samples)
    missed = tuple((shape, size) for shape, size in sizes if not near(learnt.scratch_bytes(shape), size))
    return msgspec.structs.replace(learnt, measured=missed)


def _regression(asked: Any, wanted: Sequence[float]) -> tuple[DecisionTree, ...]:
    forest = RandomForestRegressor(TREES, min_samples_leaf=2, max_features=0.5, n_jobs=2, random_state=0)
    forest.fit(asked, wanted)
    return tuple(_tree(each.tree_, None) for each in forest.estimators_)


def _tree(tree: Any, classes: Any) -> DecisionTree:
    """scikit-learn numbers the nodes with the left child next, as `DecisionTree` wants them."""
    feature, threshold, right = [], [], []
    for node in range(tree.node_count):
        leaf = tree.children_left[node] < 0
        if leaf:
            value = tree.value[node][0]
            answer = float(classes[int(np.argmax(value))]) if classes is not None else round(float(value[0]), 2)
        else:
            answer = float(tree.threshold[node])
        feature.append(-1 if leaf else int(tree.feature[node]))
        threshold.append(_short(answer))
        right.append(0 if leaf else int(tree.children_right[node]))
    return DecisionTree(feature=tuple(feature), threshold=tuple(threshold), right=tuple(right))


def _short(number: float) -> float:
    """Few digits: nearly all features are whole numbers, and so is the answer of a leaf."""
    rounded = round(number, 3)
    return int(rounded) if rounded == int(rounded) else rounded


def near(guess_bytes: int, true_bytes: int) -> bool:
    return abs(guess_bytes - true_bytes) <= max(MIB, NEAR * true_bytes)


def check(samples: Sequence[Sample]) -> None:
    """Prints a line a family: how often a model that never saw its shapes is right."""
    for family in sorted({sample.source for sample in samples}):
        asked = [sample for sample in samples if sample.source == family]
        learnt = learn(leave_out(samples, {family}))
        guesses = [learnt.scratch_bytes(sample.shape) for sample in asked]
        pairs = [(guess, sample.scratch_bytes) for guess, sample in zip(guesses, asked, strict=True)]
        large = [pair for pair in pairs if max(pair) > 32 * MIB]
        exact = sum(abs(guess - true) <= 4096 for guess, true in pairs)
        print(
            f"{family:<16} {len(pairs):6} calls, exact {exact / len(pairs):.3f}, near {_near(pairs):.3f}; "
            f"{len(large):5} large, near {_near(large):.3f}; "
            f"sum {sum(guess for guess, _ in pairs) / max(1, sum(true for _, true in pairs)):.3f} of the true one"
        )


def leave_out(samples: Sequence[Sample], families: Collection[str]) -> list[Sample]:
    """Rows without these families, and without their layers in other families."""
    layers = {_layer(sample.shape) for sample in samples if sample.source in families}
    return [s for s in samples if s.source not in families and _layer(s.shape) not in layers]


def _layer(shape: ConvShape) -> tuple[object, ...]:
    """A layer whatever its batch, layout and precision."""
    return (shape.image[1:], shape.weight, shape.stride, shape.dilation)


def _near(pairs: Sequence[tuple[int, int]]) -> float:
    return sum(near(*pair) for pair in pairs) / max(1, len(pairs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument(
        "--without", nargs="+", default=[], metavar="FAMILY", help="to judge a model by what it has not seen"
    )
    parser.add_argument("--gpu", default="NVIDIA H200")
    parser.add_argument("--torch", default="")
    parser.add_argument("--cudnn", default="")
    parser.add_argument("--out", type=Path, default=SHIPPED)
    said = parser.parse_args()
    samples = read(said.rows)
    if said.without:
        samples = Samples(*(leave_out(each, said.without) for each in samples))
    if said.check:
        check(samples.calls)
        return
    model = fit(samples, said.gpu, said.torch, said.cudnn)
    said.out.write_bytes(gzip.compress(msgspec.json.encode(model), 9, mtime=0))
    size_kib = said.out.stat().st_size // 1024
    print(f"{model.rows} rows, {len(model.call.measured)} kept as they are, {size_kib} KiB", file=sys.stderr)


if __name__ == "__main__":
    main()

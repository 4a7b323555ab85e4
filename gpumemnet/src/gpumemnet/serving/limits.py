"""Decides whether a learned model is valid for a network: only inside the ranges of its training data.

A size must be between the minimum and the maximum of the data, without a margin. The number of layers of one kind may
be up to twice the maximum; it is then clipped to the range, so that the model is never evaluated outside of its data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from carma.trial.layers.kinds import INDEX, KINDS
from gpumemnet import Family
from gpumemnet.serving.features import FEATURES, PLACE, SETTINGS, TOKEN, Features
from gpumemnet.serving.model import Model
from gpumemnet.serving.model_facts import SHIPPED, Facts
from gpumemnet.serving.saved_tensors import IS_VIEW

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROUNDING = 1e-5  # of a logarithm: features have 32 bits
UNSEEN_SHARE = 0.1  # of weights or outputs: from this share on, an unknown kind of layer is refused
LEAST_MIB = 1e-3  # as in `features`
MAX_SHOWN = 3  # offences in a message
ALTERNATIVES = "A trial run has no such limits (carma estimate -- COMMAND); --gpu-mem declares a figure that you know"

_WORDS = {
    "batch": "the batch of {}",
    "layers": "the number of layers, {},",
    "parameters": "the number of parameters, {},",
    "activations": "the outputs of all layers, {} elements for one sample,",
    "activations_batch": "the outputs of all layers, {} elements for the batch,",
    "input": "the input of {} elements",
    "largest_output": "the largest output, {} elements,",
    "second_output": "the second largest output, {} elements,",
    "largest_weight": "the largest layer, {} parameters,",
    "positions": "the number of positions of a sample, {},",
    "width": "the widest layer, {} channels,",
    "inputs_batch": "all inputs of layers, {} elements,",
    "last_output": "the last output, {} elements,",
    "resting_mib": "what weights and optimizer take, {} MiB,",
    "gradients_mib": "what gradients take, {} MiB,",
    "allocated_mib": "the memory of all tensors at once, {} MiB,",
    "scores_mib": "the scores of one attention layer, {} MiB,",
    "temporaries": "the optimizer's room in a step, {} tensors for each weight,",
    "kept_mib": "what outputs take, {} MiB,",
    "guess_mib": "the memory by plain arithmetic, {} MiB,",
    "output_inplace": "the outputs of layers that work in place, {} elements,",
    "slots": "the optimizer's state, {} tensors for each weight,",
}
_SETTING = {
    "fp32": "training in 32 bits",
    "amp": "autocast",
    "half": "weights in half precision",
    "checkpointing": "gradient checkpointing",
    "channels_last": "the memory format channels-last",
    "eager": "attention whose scores are written out",
}
_NAMES = {
    "linear": "linear", "convolution": "convolution", "grouped": "grouped convolution",
    "transposed": "transposed convolution", "batch_norm": "batch norm", "norm": "normalisation",
    "activation": "activation", "rectifier": "activation", "dropout": "dropout", "pooling": "pooling",
    "max_pooling": "max-pooling", "embedding": "embedding",
    "attention": "attention", "softmax": "softmax", "shape": "reshaping", "upsampling": "upsampling",
    "merge": "merging", "other": "other",
}  # fmt: skip
# Kinds whose number characterises the network, unlike dropouts and reshapes.
_CHARACTERISTIC = ("linear", "convolution", "grouped", "transposed", "batch_norm", "norm", "attention")
TWICE_LOG2 = 1.0
_ANGLES = ("cos_function", "sin_function")  # a kind of activation function as an angle; both are 0 without one


def _sized_features() -> Iterator[tuple[str, str, float]]:
    """The features that are sizes: name, the kind of layer that it counts (or ''), and the excess over the
    range that is allowed, as log2."""
    for name in FEATURES:
        what, _, kind = name.partition("_")
        if what not in ("count", "output"):
            kind = ""
        if name not in SETTINGS and name not in _ANGLES and (not kind or kind in _CHARACTERISTIC):
            yield name, kind, TWICE_LOG2 if what == "count" else 0.0


_SIZED = tuple(_sized_features())


def offences(found: Features, facts: Facts) -> list[str]:
    """The reasons why the model is not valid for the network, as sentences without full stop; empty if it is valid."""
    return [*_settings(found, facts), *_sizes(found, facts), *_unseen(found, facts)]


def refusal(reasons: list[str]) -> str:
    shown = "; ".join(reasons[:MAX_SHOWN])
    more = len(reasons) - MAX_SHOWN
    return f"{shown if more <= 0 else f'{shown}; and {more} more of that kind'}. {ALTERNATIVES}"


def inside(found: Features, facts: Facts) -> Features:
    """The input of the model: features clipped to their ranges, unknown kinds of layers replaced by a known kind.
    Unknown views are left out, because they hold no memory and resemble no other kind."""
    scalars, places = found.scalars.copy(), [PLACE[name] for name in facts.ranges]
    low, high = np.array(list(facts.ranges.values()), np.float32).reshape(-1, 2).T
    scalars[places] = np.minimum(np.maximum(scalars[places], low), high)
    seen = [kind for kind in KINDS if facts.kinds_seen.get(kind)]
    substitute = "other" if "other" in seen or not seen else max(seen, key=lambda kind: facts.kinds_seen[kind])
    known = np.array([INDEX[kind if kind in seen else substitute] for kind in KINDS], np.int64)
    fed = np.ones(len(found.kinds), np.bool_) if "shape" in seen else _real(found)
    return replace(found, scalars=scalars, kinds=known[found.kinds[fed]], tokens=found.tokens[fed])


def _real(found: Features) -> NDArray[np.bool_]:
    """A mask of the layers that are not views (Flatten, Identity); of all layers if all are views."""
    real = ~IS_VIEW[found.kinds] | (_sized(found, "weight_mib") > LEAST_MIB)
    return real if real.any() else np.ones(len(found.kinds), np.bool_)


def _settings(found: Features, facts: Facts) -> Iterator[str]:
    """Settings have no range: the training data contains a setting or does not."""
    for name, words in _SETTING.items():
        if name == "channels_last" and found.family == "transformer":
            continue  # at most one convolution: the format of the rest is the same
        _, high = facts.ranges.get(name, (0.0, 1.0))
        if found.scalars[PLACE[name]] > high:
            yield f"{words} is not in its training data"
    odd = [_outside(name, float(found.scalars[PLACE[name]]), facts) for name in ("slots", "temporaries")]
    yield from filter(None, odd)
    if facts.ways and found.way not in facts.ways and not any(odd):
        yield _unseen_combination(found.way, facts)


def _unseen_combination(way: str, facts: Facts) -> str:
    """The reason: the optimizer is not in the training data, or not with this number format."""
    optimizer, _, number = way.partition(" ")
    formats = [kind for one, _, kind in (known.partition(" ") for known in facts.ways) if one == optimizer]
    state = f"an optimizer that keeps {optimizer.partition('+')[0]} tensors for each weight"
    if not formats:
        return f"{state} and makes {optimizer.partition('+')[2]} in a step is not in its training data"
    return f"{state} is in its training data with {', '.join(sorted(formats))}, but not with {number}"


def _sizes(found: Features, facts: Facts) -> Iterator[str]:
    values: list[float] = found.scalars.tolist()
    for name, kind, more in _SIZED:
        if kind and not facts.kinds_seen.get(kind):
            continue
        value = values[PLACE[name]]
        if kind and value <= facts.ranges[name][1] + more:
            continue  # fewer of a kind, or somewhat more, is no other size: the totals decide
        if (offence := _outside(name, value, facts)) is not None:
            yield offence
    layers = int(_real(found).sum())
    if layers > facts.most_layers and _outside("layers", float(found.scalars[PLACE["layers"]]), facts) is None:
        yield f"the number of layers, {layers:,}, is above the maximum of its training data, {facts.most_layers:,}"


def _outside(name: str, value: float, facts: Facts) -> str | None:
    if name not in facts.ranges:
        return None
    low, high = facts.ranges[name]
    if low - ROUNDING <= value <= high + ROUNDING:
        return None
    for digits in (2, 4, 6):  # show also a small excess
        shown, least, most = (_number(name, one, digits) for one in (value, low, high))
        if shown not in (least, most):
            break
    return f"{_words(name).format(shown)} is outside its training data ({least} to {most})"


def _words(name: str) -> str:
    if name in _WORDS:
        return _WORDS[name]
    what, _, kind = name.partition("_")
    if what == "count":
        return f"the number of {_NAMES[kind]} layers, {{}},"
    return f"the outputs of {_NAMES[kind]} layers, {{}} elements,"


def _number(name: str, value: float, digits: int = 2) -> str:
    """The value with separators or in millions. Sizes are stored as log2(1 + size) in 32 bits, so only the first digits
    of large sizes are exact."""
    plain = value if name in SETTINGS else float(2.0**value - 1.0)
    for unit, word in ((1e9, "billion"), (1e6, "million")):
        if plain >= unit:
            return f"{plain / unit:,.{digits}f}".rstrip("0").rstrip(".") + f" {word}"
    return f"{plain:,.0f}" if plain >= 10 or abs(plain - round(plain)) < 0.05 else f"{plain:,.1f}"


def _unseen(found: Features, facts: Facts) -> Iterator[str]:
    """Kinds of layers that are in no network of the data and are a considerable part of this one. `other` is any
    unknown kind. Sums are in most networks and in no list of modules (`operators`); views have no outputs of their own.
    """
    outputs, weights = _sized(found, "output_mib") * _real(found), _sized(found, "weight_mib")
    for kind in KINDS:
        of_kind = found.kinds == INDEX[kind]
        if kind == "merge" or facts.kinds_seen.get(kind) or not of_kind.any():
            continue
        share, of = max((_share(outputs, of_kind), "outputs"), (_share(weights, of_kind), "weights"))
        if share > UNSEEN_SHARE:
            percent = f"{100 * share:.0f} % of its {of}"
            named = _called(found, of_kind, outputs if of == "outputs" else weights)
            yield f"{_NAMES[kind]} layers{named}, {percent}, are not in its training data"


def _called(found: Features, of_kind: NDArray[np.bool_], sizes: NDArray[np.float64]) -> str:
    """The class names of these layers, the largest first, to show the cause."""
    total: dict[str, float] = {}
    for name, is_one, size in zip(found.names, of_kind.tolist(), sizes.tolist(), strict=False):
        if is_one:
            total[name] = total.get(name, 0.0) + size
    names = sorted(total, key=lambda name: (-total[name], name))
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return f" ({', '.join(names[:MAX_SHOWN])}{more})" if names else ""


def _sized(found: Features, name: str) -> NDArray[np.float64]:
    """This size of each layer. Tokens contain log2(size + LEAST_MIB), which exists for a size of 0 too."""
    return np.maximum(np.exp2(found.tokens[:, TOKEN.index(name)].astype(np.float64)) - LEAST_MIB, 0.0)


def _share(sizes: NDArray[np.float64], of_kind: NDArray[np.bool_]) -> float:
    return float(sizes[of_kind].sum() / max(sizes.sum(), LEAST_MIB))


# Result of `carma bench estimators` on models that people use (lab/results/gpumemnet/zoo.json): the number of runs
# whose footprint stayed below the shipped model's bound, and the number of all runs.
LEVEL = 0.99  # of the tested bound
BOUND_HELD: Mapping[Family, tuple[int, int]] = {
    "mlp": (4, 4),
    "cnn": (71, 71),
    "transformer": (49, 55),
}


def bound_warning(model: Model) -> tuple[str, ...]:
    """A warning if the bound of a shipped model held less often than its level. Other models were not tested."""
    held, runs = BOUND_HELD[model.facts.family]
    if model.file.parent != SHIPPED or not model.facts.bounds or held >= LEVEL * runs:
        return ()
    share = f"{held} of {runs} {model.facts.family}s that people use ({100 * held / runs:.0f} %)"
    return (f"the bound is made for runs like those of the data set; it held for {share}, not for {100 * LEVEL:g} %",)

"""Where a learned model is valid: inside the ranges of its data. Outside of them the estimator refuses.

A size must lie between the least and the most of the data, without a margin. The number of layers of one kind may be
larger. It is then clipped to the range, so that the model is never evaluated outside of its data.
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
SAID = 3  # maximum number of offences in a message
INSTEAD = "A trial run has no such limits (carma estimate -- COMMAND); --gpu-mem declares a figure that you know"

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
# Kinds whose number characterises the network; dropouts and reshapes do not.
_WEIGHTY = ("linear", "convolution", "grouped", "transposed", "batch_norm", "norm", "attention")
TWICE = 1.0  # of a logarithm to base 2
_ANGLES = ("cos_function", "sin_function")  # neighbours are of one kind, and 0 means that there is none


def _sized_features() -> Iterator[tuple[str, str, float]]:
    """Features that are sizes, the kind of layer that they count, and by how much they may exceed the range."""
    for name in FEATURES:
        what, _, kind = name.partition("_")
        if what not in ("count", "output"):
            kind = ""
        if name not in SETTINGS and name not in _ANGLES and (not kind or kind in _WEIGHTY):
            yield name, kind, TWICE if what == "count" else 0.0


_SIZED = tuple(_sized_features())


def offences(found: Features, facts: Facts) -> list[str]:
    """What lies outside of the ranges, each as a sentence without full stop. The model is valid if there is none."""
    return [*_settings(found, facts), *_sizes(found, facts), *_unseen(found, facts)]


def refusal(said: list[str]) -> str:
    shown = "; ".join(said[:SAID])
    more = len(said) - SAID
    return f"{shown if more <= 0 else f'{shown}; and {more} more of that kind'}. {INSTEAD}"


def inside(found: Features, facts: Facts) -> Features:
    """The input of the model: features clipped to their ranges, unknown kinds as other kinds. Unknown views are left
    out: they hold no memory, and no other kind is like them."""
    scalars, places = found.scalars.copy(), [PLACE[name] for name in facts.ranges]
    low, high = np.array(list(facts.ranges.values()), np.float32).reshape(-1, 2).T
    scalars[places] = np.minimum(np.maximum(scalars[places], low), high)
    seen = [kind for kind in KINDS if facts.kinds_seen.get(kind)]
    stands_in = "other" if "other" in seen or not seen else max(seen, key=lambda kind: facts.kinds_seen[kind])
    known = np.array([INDEX[kind if kind in seen else stands_in] for kind in KINDS], np.int64)
    fed = np.ones(len(found.kinds), np.bool_) if "shape" in seen else _real(found)
    return replace(found, scalars=scalars, kinds=known[found.kinds[fed]], tokens=found.tokens[fed])


def _real(found: Features) -> NDArray[np.bool_]:
    """Layers except views (Flatten, Identity); all if there is nothing else."""
    real = ~IS_VIEW[found.kinds] | (_sized(found, "weight_mib") > LEAST_MIB)
    return real if real.any() else np.ones(len(found.kinds), np.bool_)


def _settings(found: Features, facts: Facts) -> Iterator[str]:
    """Settings of the training are no sizes: there is no small excess."""
    for name, words in _SETTING.items():
        if name == "channels_last" and found.family == "transformer":
            continue  # at most one convolution: the format of the rest is the same
        _, high = facts.ranges.get(name, (0.0, 1.0))
        if found.scalars[PLACE[name]] > high:
            yield f"{words} is in none of the runs it has learned from"
    odd = [_outside(name, float(found.scalars[PLACE[name]]), facts) for name in ("slots", "temporaries")]
    yield from filter(None, odd)
    if facts.ways and found.way not in facts.ways and not any(odd):
        yield _apart(found.way, facts)


def _apart(way: str, facts: Facts) -> str:
    """Both were seen, but not together."""
    optimizer, _, number = way.partition(" ")
    beside = [kind for one, _, kind in (known.partition(" ") for known in facts.ways) if one == optimizer]
    state = f"an optimizer that keeps {optimizer.partition('+')[0]} tensors for each weight"
    if not beside:
        return f"{state} and makes {optimizer.partition('+')[2]} in a step is in none of the runs it has learned from"
    return f"{state} was seen with {', '.join(sorted(beside))}, never with {number}"


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
        yield f"the number of layers, {layers:,}, is above the {facts.most_layers:,} of what it has learned"


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
    return f"{_words(name).format(shown)} lies outside what it has learned ({least} to {most})"


def _words(name: str) -> str:
    if name in _WORDS:
        return _WORDS[name]
    what, _, kind = name.partition("_")
    if what == "count":
        return f"the number of {_NAMES[kind]} layers, {{}},"
    return f"the outputs of {_NAMES[kind]} layers, {{}} elements,"


def _number(name: str, value: float, digits: int = 2) -> str:
    """As people write it. Sizes are log2(1 + size) in 32 bits, so of large ones only the first digits are exact."""
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
            yield f"{_NAMES[kind]} layers{named}, {percent}, are in none of the networks it has learned from"


def _called(found: Features, of_kind: NDArray[np.bool_], sizes: NDArray[np.float64]) -> str:
    """Their class names, the largest first, to show the cause."""
    total: dict[str, float] = {}
    for name, is_one, size in zip(found.names, of_kind.tolist(), sizes.tolist(), strict=False):
        if is_one:
            total[name] = total.get(name, 0.0) + size
    names = sorted(total, key=lambda name: (-total[name], name))
    more = f" and {len(names) - SAID} more" if len(names) > SAID else ""
    return f" ({', '.join(names[:SAID])}{more})" if names else ""


def _sized(found: Features, name: str) -> NDArray[np.float64]:
    """Of each layer. A token is the logarithm of a size plus a small constant, so that 0 has one."""
    return np.maximum(np.exp2(found.tokens[:, TOKEN.index(name)].astype(np.float64)) - LEAST_MIB, 0.0)


def _share(sizes: NDArray[np.float64], of_kind: NDArray[np.bool_]) -> float:
    return float(sizes[of_kind].sum() / max(sizes.sum(), LEAST_MIB))


LEVEL = 0.99  # the level that was tested
HELD: Mapping[Family, tuple[int, int]] = {
    "mlp": (4, 4),
    "cnn": (71, 71),
    "transformer": (49, 55),
}  # held, of all


def beware(model: Model) -> tuple[str, ...]:
    """Nothing is known of models that were trained elsewhere."""
    held, runs = HELD[model.facts.family]
    if model.file.parent != SHIPPED or not model.facts.bounds or held >= LEVEL * runs:
        return ()
    kept = f"of {runs} {model.facts.family}s that people use {held} kept to it ({100 * held / runs:.0f} %)"
    return (f"the bound is made for runs like those of the data set; {kept}, where {100 * LEVEL:g} % was promised",)

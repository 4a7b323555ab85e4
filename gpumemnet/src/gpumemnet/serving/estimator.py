"""`gpumemnet` and `gpumemnet-transformer`: memory by a learned model, from a description of layers.

For tasks that cannot be run, of which only a summary is known. The estimate is the median of the model's quantiles, the
bound a higher quantile with the factor that made it hold on held-out data. A model knows one GPU; for another GPU the
difference of the two contexts is added if both are known.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from carma.core.model.units import show_mib
from carma.core.model.values import Estimate, NoEstimate
from carma.core.ports import EstimateRequest
from carma.errors import PluginError
from carma.trial.cards import card_for
from carma.trial.demand.prediction import demand_of
from carma.trial.layers.column_reading import CannotTell
from carma.trial.layers.description import Described, Layer, bytes_each, slots_of
from carma.trial.layers.kinds import kind_of
from carma.trial.protocol import Context, Trials
from carma.trial.replay import card_constants as constants
from carma.trial.replay.library_memory import NCCL_BYTES, NCCL_PAIR_BYTES
from gpumemnet import Family
from gpumemnet.published.common import cut_off, parameters_of, under
from gpumemnet.serving.features import Features, features
from gpumemnet.serving.limits import bound_warning, inside, offences, refusal
from gpumemnet.serving.model import FOLDER as FOLDER
from gpumemnet.serving.model import Model, candidates, check_runtime, folders
from gpumemnet.serving.model_facts import GB_MIB, SHIPPED, Facts, Kind

MIB = 1 << 20
REST = "activations_and_the_rest"  # also workspaces and fragmentation, which a trial run separates
_NAMES: dict[Kind, str] = {"mlp": "gpumemnet", "transformer": "gpumemnet-transformer"}
_NETWORKS: dict[Family, str] = {
    "mlp": "multilayer perceptrons",
    "cnn": "convolutional networks",
    "transformer": "transformers",
}
# Side and stride of first convolutions of images: patches, and the most common stems.
_STEMS = ((32, 32), (16, 16), (14, 14), (8, 8), (11, 4), (7, 2), (5, 1), (4, 4), (3, 1))
_USES = {"mlp": ("matmul_fp32",), "cnn": ("matmul_fp32", "conv_fp32"), "transformer": ("matmul_fp32",)}


class GpuMemNet:
    quick = False

    def __init__(
        self,
        kind: Kind,
        trials: Trials,
        level: float,
        *,
        models: Sequence[Path] = (SHIPPED,),
        cards: Sequence[Path] = (constants.SHIPPED,),
    ) -> None:
        self.name = _NAMES[kind]
        self._kind, self._trials, self._level = kind, trials, level
        self._models, self._cards = tuple(models), tuple(cards)

    def estimate(self, request: EstimateRequest) -> Estimate | NoEstimate:
        described = self._trials.describe(request)
        if isinstance(described, NoEstimate):
            return under(self.name, described)
        gpu = request.gpus[0].name if request.gpus else ""
        answer = self.of(described, gpu, request.spec.gpus)
        if isinstance(answer, Estimate) and request.gpus and answer.footprint_mib > request.gpus[0].memory_mib:
            no_room = f"it does not fit: {gpu} has {show_mib(request.gpus[0].memory_mib)}"
            return replace(answer, warnings=(no_room, *answer.warnings))
        return answer

    def of(self, described: Described, gpu: str = "", gpus: int = 1) -> Estimate | NoEstimate:
        """Estimate for each of `gpus` GPUs; without a name, for the GPU that the model was learned on."""
        if reason := _unlike(described):
            return self._refuse(reason)
        described, assumed = with_input(described)
        try:
            found = features(described)
            model, passed_over = self._model(found, gpu)
            if model is None:
                return self._refuse(passed_over[0])
            quantiles = model.quantiles_mib(inside(found, model.facts))
        except (CannotTell, PluginError) as why:
            return self._refuse(str(why))
        added, warnings = self._besides(described, model.facts, gpu, gpus)
        notes = (*assumed, *cut_off(described), *warnings, *passed_over)
        return self._answer(described, model, quantiles, added, notes, gpu)

    def _model(self, found: Features, gpu: str) -> tuple[Model | None, tuple[str, ...]]:
        """The first model that has learned from such runs, and why the models before it were not used. If there is
        none, the refusal of the model that lacks least."""
        models, broken = candidates(found.family, self._kind, gpu, self._models)
        refused: list[list[str]] = []
        for model in models:
            notes = offences(found, model.facts)
            if not notes:
                names = [f"{one.file.parent / one.facts.name} does not cover it" for one in models[: len(refused)]]
                return model, (*broken, *names)
            refused.append(notes)
        if refused:
            return None, (refusal(min(refused, key=len)),)
        return None, (*broken, f"no model of {_NETWORKS[found.family]} has been learned; carma train makes one")

    def _refuse(self, reason: str) -> NoEstimate:
        return NoEstimate(source=self.name, reason=reason)

    def _answer(
        self,
        described: Described,
        model: Model,
        quantiles: Sequence[float],
        added: Mapping[str, int],
        warnings: Sequence[str],
        gpu: str,
    ) -> Estimate:
        facts, besides = model.facts, sum(added.values())
        footprint = max(1, round(quantiles[facts.place(0.5)]) + besides)
        demand = demand_of(described, gpu or facts.learned.gpu)
        upper, level, weaker = _bound(facts, quantiles, self._level)
        return Estimate(
            footprint_mib=footprint,
            upper_mib=max(footprint, round(upper) + besides),
            source=self.name,
            level=level,
            demand=demand,
            demand_predicted=demand is not None,
            gpu_model=gpu or facts.learned.gpu,
            parts_mib=_parts(described, facts, footprint, added),
            warnings=(*class_above(facts, quantiles), *warnings, *weaker, *bound_warning(model)),
            rests_on=model.provenance(),
        )

    def _besides(
        self, described: Described, facts: Facts, gpu: str, gpus: int
    ) -> tuple[dict[str, int], tuple[str, ...]]:
        """Memory that is known and not learned: another GPU's context, and what several GPUs add."""
        added: dict[str, int] = {}
        warnings: list[str] = []
        if gpu and not _same_card(gpu, facts.learned.gpu):
            difference, remark = self._card(gpu, facts)
            warnings.append(
                f"it was trained on data of {facts.learned.gpu}; on {gpu} kernels may take more or less{remark}"
            )
            added |= {"card": difference} if difference else {}
        if gpus > 1:
            each = bytes_each(described.dtype) or 4
            added["buckets"] = round(parameters_of(described) * each / MIB)
            added["nccl"] = (NCCL_PAIR_BYTES if gpus == 2 else NCCL_BYTES) // MIB
            extra = added["buckets"] + added["nccl"]
            warnings.append(
                f"it was trained on runs on one GPU; {extra:,} MiB are added for DistributedDataParallel's buckets and "
                "NCCL"
            )
        return added, tuple(warnings)

    def _card(self, gpu: str, facts: Facts) -> tuple[int, str]:
        """The difference of another GPU's context, and the text about it: whose context is counted if it was not
        measured."""
        found, learned = (constants.load(name, facts.learned.torch, self._cards) for name in (gpu, facts.learned.gpu))
        if found is None or learned is None:
            return 0, _not_its_own(facts.learned.gpu)
        uses = _USES[facts.family]
        difference = found.constants.context_mib(uses) - learned.constants.context_mib(uses)
        if not _same_card(gpu, found.constants.gpu):
            return difference, _not_its_own(found.constants.gpu)
        return difference, f"; {difference:+,} MiB for this card's context" if difference else ""


def _unlike(described: Described) -> str | None:
    """Why no run of the data was like this one, if features cannot show it."""
    if described.passes > 1:
        return (
            f"a step holds {described.passes} calls of networks at once, or trains as many networks; the model has "
            "learned from runs with one"
        )
    if bytes_each(described.dtype) not in (2, 4):
        return f"weights of the type {described.dtype} are not in its training data"
    return None


def with_input(described: Described) -> tuple[Described, tuple[str, ...]]:
    """Tables of torchinfo and torchsummary do not contain the input. It is small compared with the outputs, so the
    first layer's output replaces it: of words, their number; of images, as far as the weights determine it."""
    first = next((layer for layer in described.layers if layer.output), None)
    if described.input or first is None:
        return described, ()
    if first.inputs:
        return replace(described, input=first.inputs[0]), ()
    kind = kind_of(first.kind)
    if kind == "convolution" and (image := _image(first)):
        return replace(described, input=image), ("the input's size is guessed from the first layer: --input sets it",)
    assumed = first.output[:-1] if kind == "embedding" else first.output
    return replace(described, input=assumed), ("the input's size is not known: the first layer's output stands in",)


def _image(layer: Layer) -> tuple[int, ...]:
    """The input of a first convolution: one to four channels, with the stride that is common for its kernel."""
    batch, channels, *sides = layer.output if len(layer.output) >= 3 else (0, 0)
    for side, stride in _STEMS if channels else ():
        taken, rest = divmod(layer.parameters // channels, side ** len(sides))
        if 1 <= taken <= 4 and rest <= 1:
            return (batch, taken, *(size * stride for size in sides))
    return ()


def _not_its_own(gpu: str) -> str:
    return f", and the context that is counted is that of {gpu}: this card's is unknown (carma calibrate measures it)"


def _same_card(one: str, other: str) -> bool:
    known = card_for(one)
    return one.casefold() == other.casefold() or (known is not None and known is card_for(other))


def _bound(facts: Facts, quantiles: Sequence[float], level: float) -> tuple[float, float | None, tuple[str, ...]]:
    """The lowest level in the facts that is at least as high as wanted; else the highest, with a warning."""
    known = sorted((float(text), bound) for text, bound in facts.bounds.items())
    if not known:
        return quantiles[-1], None, ("no bound was learned: the highest quantile stands in for it",)
    reached, bound = next((pair for pair in known if pair[0] >= level - 1e-9), known[-1])
    weaker = () if reached >= level - 1e-9 else (f"the bound is for {100 * reached:g} %: no higher one was learned",)
    return quantiles[facts.place(bound.quantile)] * bound.factor, reached, weaker


def class_of(facts: Facts, mib: float) -> int:
    """Class k of width w holds [k·w, (k+1)·w)."""
    return int(mib // (facts.width_gb * GB_MIB))


def class_above(facts: Facts, quantiles: Sequence[float]) -> tuple[str, ...]:
    """Class of the operating point, with which the model answers as a classifier: an under-estimate costs more there.
    The answer says if that class differs from the footprint's."""
    careful = class_of(facts, float(np.interp(facts.operating_point, facts.quantiles, quantiles)))
    if careful <= class_of(facts, quantiles[facts.place(0.5)]):
        return ()
    low, high = careful * facts.width_gb, (careful + 1) * facts.width_gb
    return (f"it may well lie in the class above: {low}–{high} GB (of 1,000 MiB)",)


def _parts(described: Described, facts: Facts, footprint: int, added: Mapping[str, int]) -> dict[str, int]:
    """Parts of the estimate, by arithmetic as far as possible; the rest is outputs, workspaces and fragmentation in
    one. Empty if the arithmetic gives more than the footprint (weights that are not trained)."""
    weights = parameters_of(described) * (bytes_each(described.dtype) or 4) / MIB
    state = round(slots_of(described) * weights)
    parts = {"weights": round(weights), "gradients": round(weights), "optimizer_state": state}
    parts |= {"context": round(facts.base_mib) + added.get("card", 0)}
    parts |= {name: mib for name, mib in added.items() if name != "card"}
    rest = footprint - sum(parts.values())
    return {} if rest < 0 else {**parts, REST: rest}


def _make(kind: Kind, context: Context) -> GpuMemNet:
    check_runtime()
    level = context.rules.memory.level
    cards = constants.folders(os.environ)
    return GpuMemNet(kind, context.trials, level, models=folders(os.environ), cards=cards)


make = partial(_make, "mlp")
make_transformer = partial(_make, "transformer")

"""DNNMem: analytic, from the computation graph (Gao et al., ESEC/FSE 2020, doi 10.1145/3368089.3417050).

It traverses the graph in order, forward and backward, and allocates for each operator: weights and their gradients,
inputs and outputs with their liveness, ephemeral tensors (the workspaces of cuDNN), all through the framework's
allocator, and adds the CUDA context. Its program is not public. This follows the abstract and what later papers say
about the method, not the paper's full text: details may differ from the authors' program.

The graph is replaced by the layers in the order of their calls, each fed by the one before it: an output lives until
the backward pass of its layer has ended. Branches and functions between modules are not seen. Where the paper asks
cuDNN for a workspace, an explicit matrix product is counted, whose size is known: one unfolded sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from carma.trial.layers.description import Described, Layer, bytes_each
from carma.trial.replay.allocator import CachingAllocator
from carma.trial.replay.allocator_options import AllocatorOptions
from gpumemnet.published.common import (
    CONTEXT_MIB,
    Found,
    Parts,
    Published,
    cut_off,
    no_outputs,
    numel,
    of_model,
    parameters_of,
)
from gpumemnet.summaries.training_options import OPTIMIZERS

_STEPS = 2  # the optimizer's state is allocated in the first step, so the peak is in the second
_VIEWS = ("Flatten", "Unflatten", "Identity", "ModuleList", "ModuleDict")
_SLOTS = dict(reversed(OPTIMIZERS.values()))  # of SGD those without momentum, which come first


@of_model
def _dnnmem(described: Described, _gpus: int) -> Found:
    if described.batch is None:
        return "the batch size is not known; the graph's sizes depend on it"
    if reason := no_outputs(described):
        return reason
    replay = _Replay(described)
    replay.run()
    parts = replay.parts()
    context = {"context": CONTEXT_MIB}
    return Parts(parts, _warnings(described), fixed_mib=context, reserved_bytes=sum(parts.values()))


class _Replay:
    """Training steps over the chain of layers, with the model of the allocator."""

    def __init__(self, described: Described) -> None:
        self.described = described
        self.allocator = CachingAllocator(AllocatorOptions())
        self._made = 0
        self._each = bytes_each(described.dtype) or 4
        self._slots = _slots(described) or 0
        self._gradients: dict[int, int] = {}  # of the weights, by the layer's index; kept from step to step
        self._blocks = _blocks(described)
        self._weights = [count * self._each for count in _weights(described)]

    def run(self) -> None:
        for weight in self._weights:
            self._malloc(weight)
        data = self._malloc(numel(self.described.input) * self._each)
        for step in range(_STEPS):
            self._backward(self._forward())
            if step == 0:
                self._first_step()
        self.allocator.free(data)

    def parts(self) -> dict[str, int]:
        weights = sum(self._weights)
        known = {"weights": weights, "gradients": weights, "optimizer": weights * self._slots}
        rest = self.allocator.peak_allocated - sum(known.values())
        rounding = self.allocator.peak_reserved - self.allocator.peak_allocated
        return known | {"activations": rest, "fragmentation": rounding}

    def _malloc(self, size: int) -> int:
        self._made += 1
        self.allocator.malloc(self._made, size)
        return self._made

    def _forward(self) -> list[int | None]:
        outputs: list[int | None] = []
        for layer in self.described.layers:
            made = _makes_output(layer) and layer.name not in self._blocks
            kept = self._malloc(numel(layer.output) * self._each) if made else None
            outputs.append(kept)
            self._workspace(layer)
        return outputs

    def _backward(self, outputs: list[int | None]) -> None:
        """The gradient of each output is allocated in the backward pass of the next layer, and freed after its own."""
        layers = self.described.layers
        flowing = self._malloc(self._input_of(len(layers)))  # of the last output, allocated by the loss
        first = next((place for place, output in enumerate(outputs) if output is not None), 0)
        for place in reversed(range(len(layers))):
            self._workspace(layers[place])
            if place not in self._gradients:
                self._gradients[place] = self._malloc(self._weights[place])
            output = outputs[place]
            if output is None:
                continue
            before = self._malloc(self._input_of(place) if place > first else 0)  # the data has no gradient
            self.allocator.free(output)
            self.allocator.free(flowing)
            flowing = before
        self.allocator.free(flowing)
        if len(layers) not in self._gradients:
            self._gradients[len(layers)] = self._malloc(self._weights[-1])

    def _input_of(self, place: int) -> int:
        """Bytes of the input of the layer at that index; after the last layer, of the loss."""
        layers = self.described.layers
        if place < len(layers) and layers[place].inputs:
            return numel(layers[place].inputs[0]) * self._each
        before = next((layer for layer in reversed(layers[:place]) if layer.output), None)
        return numel(before.output) * self._each if before else 0

    def _workspace(self, layer: Layer) -> None:
        size = workspace_values(layer) * self._each
        if size:
            self.allocator.free(self._malloc(size))

    def _first_step(self) -> None:
        for weight in self._weights:
            for _ in range(self._slots):
                self._malloc(weight)


def _weights(described: Described) -> list[int]:
    """Values of each layer's parameters, and last of those that belong to no layer. A tied one counts with its first
    layer, so the excess is subtracted from the last layers."""
    counts = [layer.parameters for layer in described.layers]
    rest = parameters_of(described) - sum(counts)
    for place in reversed(range(len(counts))):
        tied = min(counts[place], max(-rest, 0))
        counts[place] -= tied
        rest += tied
    return [*counts, max(rest, 0)]


def _makes_output(layer: Layer) -> bool:
    return bool(layer.output) and not layer.inplace and not layer.kind.startswith(_VIEWS)


def _blocks(described: Described) -> frozenset[str]:
    """Names of layers that contain others: such a layer owns parameters, but returns what its last layer made."""
    paths = (layer.name.split(".") for layer in described.layers)
    return frozenset(".".join(path[:end]) for path in paths for end in range(1, len(path)))


def workspace_values(layer: Layer) -> int:
    """Workspace values of a convolution as an explicit matrix product: one unfolded sample, for each group in turn; 1 ×
    1 needs none."""
    kernel = numel(tuple(_integers(layer.attributes.get("kernel_size", ""))))
    if not layer.kind.startswith("Conv") or kernel <= 1 or len(layer.output) < 3:
        return 0
    channels = next(_integers(layer.attributes.get("in_channels", "")), 0)
    groups = next(_integers(layer.attributes.get("groups", "1")), 1) or 1
    return channels // groups * kernel * numel(layer.output[2:])


def _integers(text: str) -> Iterator[int]:
    return (int(number) for number in re.findall(r"\d+", text))


def _slots(described: Described) -> int | None:
    if described.optimizer_slots is not None:
        return described.optimizer_slots
    return _SLOTS.get(described.optimizer)


def _warnings(described: Described) -> tuple[str, ...]:
    found = ["sees modules only: what is computed between them and where they branch is left out"]
    if _slots(described) is None:
        found.append("the optimizer is not known; it is taken to keep no state")
    if described.autocast:
        found.append(f"knows no autocast: everything is counted in {described.dtype}")
    if described.checkpointing:
        found.append("knows no gradient checkpointing: every output is counted as kept")
    found.append(f"the CUDA context is taken as {CONTEXT_MIB} MiB")
    return (*found, *cut_off(described))


make = partial(Published, "dnnmem", _dnnmem)

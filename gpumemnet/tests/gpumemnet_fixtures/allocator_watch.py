"""Two training steps as GPUMemNet's arithmetic plays them, with every tensor that comes and goes written down."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from carma.trial.layers.column_reading import LayerReading
from carma.trial.layers.description import Described, Layer
from gpumemnet.serving import layer_chain as chain
from gpumemnet.serving import tensor_sizes as sizing
from gpumemnet.serving.caching_allocator import MIB, Block, Cache
from gpumemnet.serving.conv_scratch import NONE
from gpumemnet.serving.features import features
from gpumemnet.serving.tensor_sizes import Sizes

WORKSPACE = chain.WORKSPACE / MIB


def mib(size: int) -> float:
    return round(size / MIB, 1)


class _Watched(Cache):
    """Sizes are those that were asked for; a block may be a little larger. To a tenth of a MiB: every layer with many
    parameters is taken to have a bias, which is less and is counted elsewhere."""

    def __init__(self, least: int) -> None:
        super().__init__(least)
        self.least = least
        self.events: list[float] = []  # MiB; what goes is negative
        self.there: dict[Block, float] = {}
        self.left: list[float] = []  # MiB that are there after each part that is played

    def play(self, steps: list[int], taken: list[Block]) -> None:
        for step in steps:
            if step < 0:
                self.events.append(-self.there.pop(taken[~step]))  # a KeyError tells that it went before
                super().play([step], taken)
            else:
                assert step >= self.least
                super().play([step], taken)
                self.there[taken[-1]] = mib(step)
                self.events.append(mib(step))
        self.left.append(sum(self.there.values()))


@dataclass(frozen=True)
class Played:
    """MiB. No tensor of a test may be as large as a workspace: that parts the passes."""

    sizes: Sizes
    events: tuple[float, ...]
    left: float  # by the first step, without the workspaces

    @property
    def weights(self) -> float:
        return sum(self.events[: self.events.index(WORKSPACE)])

    @property
    def turn(self) -> int:
        """Where the first backward pass begins: its thread takes a workspace of its own."""
        first = self.events.index(WORKSPACE)
        return self.events.index(WORKSPACE, first + 1)

    @property
    def forward(self) -> tuple[float, ...]:
        """What comes and goes in the first forward pass, the loss included."""
        return self.events[self.events.index(WORKSPACE) + 1 : self.turn]

    @property
    def kept(self) -> float:
        """What is there between the passes beside weights: what went in, what layers keep, and of the last layer the
        output and its gradient."""
        return sum(self.forward)

    @property
    def back(self) -> tuple[float, ...]:
        """What comes and goes in the first backward pass, while anything is left of the step."""
        resting, there = self.weights + 2 * WORKSPACE, sum(self.events[: self.turn + 1])
        for place in range(self.turn + 1, len(self.events)):
            there += self.events[place]
            if abs(there - resting) < 1e-6:
                return self.events[self.turn + 1 : place + 1]
        raise AssertionError(f"{there - resting} MiB are left of the first step")


def played(described: Described) -> Played:
    """As `features` has it played, without cuDNN's workspaces, which are another's to tell."""
    caches: list[_Watched] = []
    found: list[Sizes] = []

    def cache(least: int) -> Cache:
        caches.append(_Watched(least))
        return caches[-1]

    def sizes(reading: LayerReading, heads: float) -> Sizes:
        found.append(Sizes(reading, heads))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "Cache", cache)
        patch.setattr(chain, "Sizes", sizes)
        patch.setattr(sizing, "scratch_of", lambda described: [NONE] * len(described.layers))
        features(described)
    (watched,), (chosen,) = caches, found
    return Played(chosen, tuple(watched.events), watched.left[-2] - 2 * WORKSPACE)


def model(*layers: Layer, **changed: object) -> Described:
    """SGD keeps nothing. The first dimension is the batch."""
    shape = layers[0].output
    base = Described(layers=layers, batch=shape[0], input=shape, optimizer="SGD", optimizer_slots=0)
    return replace(base, **changed)


def layer(kind: str, *shape: int, parameters: int = 0, inplace: bool = False) -> Layer:
    """What goes in is left to be worked out."""
    return Layer(kind=kind, output=shape, parameters=parameters, inplace=inplace)


def linear(into: int, *shape: int) -> Layer:
    """Without a bias."""
    return Layer(kind="Linear", output=shape, parameters=into * shape[-1], inputs=((*shape[:-1], into),))


def conv(into: int, *shape: int) -> Layer:
    """Of one place, without a bias."""
    taken = (shape[0], into, *shape[2:])
    return Layer(kind="Conv2d", output=shape, parameters=into * shape[1], inputs=(taken,))


def follow(events: tuple[float, ...], *part: float) -> bool:
    """Whether these came and went one right after the other."""
    return any(events[begin : begin + len(part)] == part for begin in range(len(events)))

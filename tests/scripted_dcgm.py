"""A scripted libdcgm with its host engine: the library that HostEngine uses, without either of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from carma.monitor.libdcgm import GPU, GPU_INSTANCE, UUID_FIELD, DcgmError, Entity, Libdcgm, Value

CONNECTION_NOT_VALID = -21
NOT_SUPPORTED = -6
MODULE_NOT_LOADED = -33
NO_DATA = -14
BLANK = 140737488355328.0

# In the order of the fields 1001 to 1005: engine, SM active, SM occupancy, tensor, DRAM.
FIGURES = (0.9, 0.25, 0.125, 0.03, 0.06)


@dataclass
class Card:
    uuid: str
    figures: tuple[float, ...] = FIGURES
    status: int = 0
    age_s: float = 0.0
    refuses: int | None = None  # the error with which it turns down a watch
    instances: Mapping[int, tuple[float, ...]] = field(default_factory=dict)  # number of the GPU instance -> figures


class ScriptedDcgm(Libdcgm):
    """`now` is the host engine's clock. With `up` False, connections are refused and open ones break."""

    def __init__(self, *cards: Card) -> None:
        self.cards = list(cards)
        self.up = True
        self.now = 1_700_000_000.0
        self.connects = 0
        self.closed = False
        self.names: list[str] = []
        self._connection: int | None = None
        self._watched: set[tuple[Entity, int]] = set()

    def restart(self) -> None:
        """The host engine ends and starts: connections and watches are gone."""
        self._connection = None
        self._watched.clear()

    def connect(self, address: str, timeout_ms: int) -> int:
        assert address == "127.0.0.1"
        assert timeout_ms > 0
        self.connects += 1
        if not self.up:
            raise DcgmError("dcgmConnect_v2", CONNECTION_NOT_VALID)
        self._connection = self.connects
        return self._connection

    def disconnect(self, handle: int) -> None:
        self._need(handle)
        self.restart()

    def gpus(self, handle: int) -> list[Entity]:
        self._need(handle)
        return [Entity(GPU, number) for number in range(len(self.cards))]

    def instances(self, handle: int) -> list[tuple[str, int, Entity]]:
        self._need(handle)
        return [
            (card.uuid, instance, Entity(GPU_INSTANCE, 8 * number + instance))
            for number, card in enumerate(self.cards)
            for instance in card.instances
        ]

    def watch(self, handle: int, name: str, entities: Sequence[Entity], fields: Sequence[int], every_s: float) -> None:
        self._need(handle)
        assert name not in self.names  # the host engine wants every field group's name once
        assert every_s > 0
        self.names.append(name)
        for entity in entities:
            refusal = self._card(entity).refuses
            if refusal is not None:
                raise DcgmError("dcgmWatchFields", refusal)
            self._watched |= {(entity, one) for one in fields}

    def latest(
        self, handle: int, entities: Sequence[Entity], fields: Sequence[int], *, live: bool = False
    ) -> list[Value]:
        """The latest values, in another order than requested: the real library is documented to do that."""
        self._need(handle)
        return [self._value(entity, one, live) for one in reversed(fields) for entity in reversed(entities)]

    def close(self) -> None:
        self.closed = True

    def _value(self, entity: Entity, field_id: int, live: bool) -> Value:
        card = self._card(entity)
        at_us = round((self.now - card.age_s) * 1e6)
        if field_id == UUID_FIELD:
            assert live  # no subscriber watches this field
            return Value(entity, field_id, 0, at_us, card.uuid)
        assert not live
        if (entity, field_id) not in self._watched:
            return Value(entity, field_id, NO_DATA, 0, BLANK)
        figures = card.instances[entity.number % 8] if entity.group == GPU_INSTANCE else card.figures
        return Value(entity, field_id, card.status, at_us, figures[field_id - 1001])

    def _card(self, entity: Entity) -> Card:
        return self.cards[entity.number // 8 if entity.group == GPU_INSTANCE else entity.number]

    def _need(self, handle: int) -> None:
        if not self.up or handle != self._connection:
            raise DcgmError("a call", CONNECTION_NOT_VALID)

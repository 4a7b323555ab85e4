"""What every confiner guarantees: the one of cards and MIG instances, and the one of virtual GPUs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from carma.core.model.settings import Sharing
from carma.core.model.values import Booking, Gpu, GpuId, Placement
from carma.core.ports import Arranged, Confiner, LaunchOrder
from carma.launch.confinement import GpuConfiner
from carma.testing.launcher_contract import order_of
from carma.vgpu.device import LIMIT_VARIABLE
from carma.vgpu.virtual_server import VirtualConfiner
from tests.launch_orders import spec_of

CARDS = tuple(Gpu(id=GpuId(f"GPU-{index}"), index=index, name="H200", memory_mib=143_155) for index in range(2))
KINDS = ("cards", "virtual")


def confiner(kind: str, sharing: Sharing) -> Confiner:
    return VirtualConfiner(sharing) if kind == "virtual" else GpuConfiner(sharing, None)


def order(*, gpus: int = 1, cap_mib: int | None = None, alone: bool = False, **spec: Any) -> LaunchOrder:
    booking = Booking(memory_mib=4000, source="declared", cap_mib=cap_mib, alone=alone)
    cards = CARDS[:gpus]
    placement = Placement(gpus=tuple(card.id for card in cards), booking=booking)
    return msgspec.structs.replace(order_of(spec_of("true", **spec)), placement=placement, gpus=cards)


def rungs(arranged: Arranged) -> list[str]:
    return [guard.rung for guard in arranged.confinement.guards]


@pytest.mark.parametrize("kind", KINDS)
def test_an_attempt_without_gpus_has_no_guard_and_no_variable(kind: str) -> None:
    arranged = confiner(kind, Sharing(mechanism="timeslice")).arrange(order(gpus=0))
    assert (rungs(arranged), arranged.environment, arranged.mps_server) == ([], {}, None)


@pytest.mark.parametrize("kind", KINDS)
def test_an_attempt_alone_on_its_gpus_has_no_guard_and_no_variable(kind: str) -> None:
    arranged = confiner(kind, Sharing()).arrange(order(alone=True, cap_mib=4096))
    assert (rungs(arranged), arranged.environment) == ([], {})


@pytest.mark.parametrize("kind", KINDS)
def test_the_watchdog_is_the_guard_of_an_attempt_without_a_cap(kind: str) -> None:
    (guard,) = confiner(kind, Sharing()).arrange(order()).confinement.guards
    assert (guard.rung, guard.limit_mib) == ("watchdog", 4000)
    assert rungs(confiner(kind, Sharing(watchdog=False)).arrange(order())) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_of_the_sms_is_noted_where_mps_is_missing(kind: str) -> None:
    arranged = confiner(kind, Sharing(mechanism="timeslice")).arrange(order(threads_percent=30))
    assert arranged.confinement.mechanism == "timeslice"
    assert arranged.confinement.note


def test_a_virtual_gpu_enforces_the_cap_itself() -> None:
    arranged = confiner("virtual", Sharing()).arrange(order(gpus=2, cap_mib=4096))
    assert arranged.environment == {LIMIT_VARIABLE: "4096"}
    assert [(guard.rung, guard.limit_mib) for guard in arranged.confinement.guards] == [
        ("framework", 4096),
        ("watchdog", 4000),
    ]
    assert arranged.confinement.note == ""


@pytest.mark.parametrize(("setting", "wish"), [("mps", None), ("auto", "mps")])
def test_virtual_gpus_note_that_demanded_mps_is_missing(setting: str, wish: str | None) -> None:
    sharing = msgspec.convert({"mechanism": setting}, Sharing)
    confinement = confiner("virtual", sharing).arrange(order(mechanism=wish)).confinement
    assert confinement.mechanism == "timeslice"
    assert confinement.note

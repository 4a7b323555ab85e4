"""Activity from a scripted DCGM host engine: the figures, and the missing ones."""

from __future__ import annotations

import pytest

from carma.core.model.values import NO_ACTIVITY, Activity, GpuId
from carma.monitor.dcgm import STALE_S, HostEngine
from carma.monitor.devices import Place
from carma.monitor.libdcgm import DcgmError, Entity, Libdcgm
from tests.scripted_dcgm import BLANK, MODULE_NOT_LOADED, NO_DATA, NOT_SUPPORTED, Card, ScriptedDcgm

A, B = Place(GpuId("GPU-a")), Place(GpuId("GPU-b"))
BUSY = Activity(sm_active=0.25, sm_occupancy=0.125, dram_active=0.06, gr_active=0.9, tensor_active=0.03)


class Around:
    """A host engine under test with a clock of its own; `loads` counts the tries to open the library."""

    def __init__(self, dcgm: ScriptedDcgm | None) -> None:
        self.dcgm = dcgm
        self.loads = 0
        self.monotonic = 0.0
        self.engine = HostEngine(self._load, monotonic=lambda: self.monotonic, wall=self._wall)

    def after(self, seconds: float, *places: Place) -> dict[Place, Activity]:
        self.monotonic += seconds
        if self.dcgm is not None:
            self.dcgm.now += seconds
        return self.engine.read(places)

    def _load(self) -> Libdcgm | None:
        self.loads += 1
        return self.dcgm

    def _wall(self) -> float:
        return self.dcgm.now if self.dcgm is not None else 0.0


def test_every_gpu_gets_its_own_figures_whatever_the_order_of_the_answer() -> None:
    around = Around(ScriptedDcgm(Card("GPU-b", figures=(0.2, 0.1, 0.05, 0.0, 0.01)), Card("GPU-a")))
    quiet = Activity(gr_active=0.2, sm_active=0.1, sm_occupancy=0.05, tensor_active=0.0, dram_active=0.01)
    assert around.after(0.0, A, B) == {A: BUSY, B: quiet}
    assert around.engine.problem is None


def test_only_the_gpus_that_are_asked_for_are_watched() -> None:
    around = Around(ScriptedDcgm(Card("GPU-a", refuses=NOT_SUPPORTED), Card("GPU-b")))
    assert around.after(0.0, B) == {B: BUSY}
    assert around.engine.problem is None


def test_instances_are_found_by_their_card_and_number() -> None:
    instances = {1: (0.5, 0.4, 0.3, 0.2, 0.1), 2: (0.0, 0.0, 0.0, 0.0, 0.0)}
    around = Around(ScriptedDcgm(Card("GPU-b"), Card("GPU-a", instances=instances)))
    found = around.after(0.0, Place(A.card, 1), Place(A.card, 2), B)
    assert {place: activity.sm_active for place, activity in found.items()} == {
        Place(A.card, 1): 0.4,
        Place(A.card, 2): 0.0,
        B: 0.25,
    }


def test_without_the_library_there_are_no_figures_and_it_is_tried_at_increasing_intervals() -> None:
    around = Around(None)
    for _ in range(2000):
        assert around.after(1.0, A) == {}
    assert around.loads == 1 + 9  # at once, then 5, 15, 35, 75, 155, 315, 635, 1235 and 1835 s later
    assert "no DCGM library" in (around.engine.problem or "")


def test_no_library_is_opened_while_no_gpu_needs_it() -> None:
    around = Around(ScriptedDcgm(Card("GPU-a")))
    assert around.after(100.0) == {}
    assert around.loads == 0


def test_a_host_engine_that_comes_later_is_found() -> None:
    dcgm = ScriptedDcgm(Card("GPU-a"))
    dcgm.up = False
    around = Around(dcgm)
    assert around.after(0.0, A) == {}
    assert "does not answer" in (around.engine.problem or "")
    dcgm.up = True
    assert around.after(1.0, A) == {}  # not yet: a try is not due
    assert around.after(5.0, A) == {A: BUSY}
    assert (around.loads, around.engine.problem) == (1, None)


def test_the_values_of_a_host_engine_are_missing_while_it_is_down() -> None:
    dcgm = ScriptedDcgm(Card("GPU-a"))
    around = Around(dcgm)
    assert around.after(0.0, A) == {A: BUSY}
    dcgm.up = False
    for _ in range(20):
        assert around.after(1.0, A) == {}
    dcgm.up = True
    assert around.after(60.0, A) == {A: BUSY}


def test_after_a_restart_the_gpus_are_identified_and_watched_again() -> None:
    dcgm = ScriptedDcgm(Card("GPU-a"), Card("GPU-b", figures=(0.0, 0.0, 0.0, 0.0, 0.0)))
    around = Around(dcgm)
    around.after(0.0, A, B)
    dcgm.restart()
    dcgm.cards.reverse()
    assert around.after(1.0, A, B) == {}
    around.after(1.0, A, B)
    found = around.after(6.0, A, B)
    assert (found[A].sm_active, found[B].sm_active) == (0.25, 0.0)


@pytest.mark.parametrize("code", [MODULE_NOT_LOADED, NOT_SUPPORTED])
def test_a_refused_watch_leaves_the_other_cards_and_is_tried_again(code: int) -> None:
    dcgm = ScriptedDcgm(Card("GPU-a", refuses=code), Card("GPU-b"))
    around = Around(dcgm)
    assert around.after(0.0, A, B) == {B: BUSY}
    assert str(code) in (around.engine.problem or "")
    dcgm.cards[0].refuses = None
    around.after(1.0, A, B)
    assert around.after(6.0, A, B) == {A: BUSY, B: BUSY}
    assert around.engine.problem is None
    assert dcgm.connects == 1


def test_a_gpu_that_the_host_engine_does_not_know_is_a_problem_with_a_sentence() -> None:
    around = Around(ScriptedDcgm(Card("GPU-a")))
    assert around.after(0.0, A, B) == {A: BUSY}
    assert "does not know" in (around.engine.problem or "")


@pytest.mark.parametrize("value", [BLANK, BLANK + 1, BLANK + 2, BLANK + 3, float("nan"), float("inf"), -0.5, 1.5])
def test_blank_and_nonsense_values_are_not_given(value: float) -> None:
    around = Around(ScriptedDcgm(Card("GPU-a", figures=(0.9, value, 0.125, 0.03, 1.04))))
    found = around.after(0.0, A)[A]
    assert found == Activity(gr_active=0.9, sm_occupancy=0.125, tensor_active=0.03, dram_active=1.0)


def test_values_with_an_error_or_from_long_ago_are_not_given() -> None:
    card = Card("GPU-a", status=NO_DATA)
    around = Around(ScriptedDcgm(card))
    assert around.after(0.0, A) == {A: NO_ACTIVITY}
    card.status, card.age_s = 0, STALE_S + 1.0
    assert around.after(1.0, A) == {A: NO_ACTIVITY}
    card.age_s = STALE_S - 1.0
    assert around.after(1.0, A) == {A: BUSY}


def test_instances_that_cannot_be_listed_leave_the_cards() -> None:
    class Without(ScriptedDcgm):
        def instances(self, handle: int) -> list[tuple[str, int, Entity]]:
            raise DcgmError(f"dcgmGetGpuInstanceHierarchy of {handle}", NOT_SUPPORTED)

    around = Around(Without(Card("GPU-a"), Card("GPU-b", instances={1: (1.0, 1.0, 1.0, 1.0, 1.0)})))
    assert around.after(0.0, A, Place(B.card, 1)) == {A: BUSY}


def test_close_hangs_up_and_can_be_repeated() -> None:
    dcgm = ScriptedDcgm(Card("GPU-a"))
    around = Around(dcgm)
    around.after(0.0, A)
    around.engine.close()
    around.engine.close()
    assert dcgm.closed
    with pytest.raises(DcgmError):
        dcgm.gpus(dcgm.connects)

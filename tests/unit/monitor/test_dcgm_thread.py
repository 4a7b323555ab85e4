"""DCGM beside NVML: the thread that reads it, and the choice of a GPU's source of activity."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

import pynvml
import pytest

from carma.core.model.values import ACTIVITY_METRICS, NO_ACTIVITY, Activity, GpuId
from carma.monitor.dcgm import FRESH_S, DcgmThread, HostEngine
from carma.monitor.devices import Place
from carma.monitor.nvml import NvmlSampler
from tests import scripted_dcgm
from tests.scripted_dcgm import NO_DATA, ScriptedDcgm
from tests.scripted_nvml import Card, ScriptedNvml

LIMIT_S = 180.0
A = Place(GpuId("GPU-a"))


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


class Setup:
    """A scripted host engine behind a real thread that reads it without pausing."""

    def __init__(self, *cards: scripted_dcgm.Card) -> None:
        self.dcgm = ScriptedDcgm(*cards)
        self.monotonic = 0.0
        engine = HostEngine(lambda: self.dcgm, monotonic=self._tick, wall=lambda: self.dcgm.now)
        self.feed = DcgmThread(engine, period_s=0.002, first_s=LIMIT_S, monotonic=lambda: self.monotonic)
        self._engine_s = 0.0

    def _tick(self) -> float:
        """The engine's own clock runs fast, so that a retry is due every few readings."""
        self._engine_s += 10.0
        return self._engine_s


@pytest.fixture
def setup() -> Iterator[Setup]:
    made = Setup(scripted_dcgm.Card("GPU-a"), scripted_dcgm.Card("GPU-b"))
    yield made
    made.feed.close()


def over(nvml: ScriptedNvml, feed: DcgmThread) -> NvmlSampler:
    return NvmlSampler(nvml, monotonic=nvml.monotonic, process_name=lambda _: "", dcgm=feed)


def test_a_card_without_gpm_takes_its_activity_from_dcgm(setup: Setup) -> None:
    sampler = over(ScriptedNvml(Card("GPU-a", gpm=None, process_util=[(7, 1, 50)])), setup.feed)
    can = sampler.gpus()[0].capabilities
    assert (can.source, set(can.metrics)) == ("dcgm", set(ACTIVITY_METRICS))
    assert (can.power, can.processes) == (True, True)
    (sample,) = sampler.sample(1.0)
    assert (sample.activity.sm_active, sample.activity.sm_occupancy, sample.activity.dram_active) == (0.25, 0.125, 0.06)
    assert (sample.activity.gr_active, sample.activity.tensor_active, sample.gpu_util, sample.power_w) == (
        0.9,
        0.03,
        0.97,
        120.5,
    )


def test_dcgm_is_not_used_if_gpm_answers(setup: Setup) -> None:
    sampler = over(ScriptedNvml(Card("GPU-a")), setup.feed)
    assert sampler.gpus()[0].capabilities.source == "gpm"
    assert (setup.dcgm.connects, sampler.activity_problem()) == (0, None)


def test_each_gpu_has_the_best_source_of_its_own(setup: Setup) -> None:
    nvml = ScriptedNvml(Card("GPU-a", gpm=None), Card("GPU-c"), Card("GPU-d", gpm=None, process_util=[(7, 1, 50)]))
    nvml.cards.append(Card("GPU-e", gpm=None))
    sampler = over(nvml, setup.feed)
    assert [gpu.capabilities.source for gpu in sampler.gpus()] == ["dcgm", "gpm", "processes", "nvml"]
    assert "does not know" in (sampler.activity_problem() or "")


def test_a_host_engine_that_starts_later_becomes_the_source(setup: Setup) -> None:
    setup.dcgm.up = False
    sampler = over(ScriptedNvml(Card("GPU-a", gpm=None)), setup.feed)
    assert sampler.gpus()[0].capabilities.source == "nvml"
    assert sampler.sample(0.0)[0].activity.sm_active is None
    setup.dcgm.up = True
    eventually(lambda: setup.feed.offers(A))
    assert sampler.sample(1.0)[0].activity.sm_active == 0.25
    assert sampler.gpus()[0].capabilities.source == "dcgm"


def test_while_the_host_engine_is_away_activity_is_absent_and_the_rest_is_not(setup: Setup) -> None:
    sampler = over(ScriptedNvml(Card("GPU-a", gpm=None, used_mib=10)), setup.feed)
    setup.dcgm.up = False
    eventually(lambda: setup.feed.latest(A) == NO_ACTIVITY)
    (sample,) = sampler.sample(1.0)
    assert (sample.activity.sm_active, sample.activity.tensor_active, sample.fault) == (None, None, None)
    assert (sample.memory_used_mib, sample.power_w) == (10, 120.5)
    assert sampler.gpus()[0].capabilities.source == "dcgm"  # it is to come back
    setup.dcgm.up = True
    eventually(lambda: sampler.sample(2.0)[0].activity.sm_active == 0.25)


def test_dcgm_stays_the_source_when_the_driver_was_restarted(setup: Setup) -> None:
    nvml = ScriptedNvml(Card("GPU-a", gpm=None))
    sampler = over(nvml, setup.feed)
    nvml.restart_driver()
    assert sampler.sample(0.0)[0].fault is not None
    nvml.pass_s(2.0)
    sampler.sample(2.0)
    assert (sampler.gpus()[0].capabilities.source, sampler.sample(3.0)[0].activity.sm_active) == ("dcgm", 0.25)


def test_a_lost_gpu_has_no_activity_even_if_dcgm_still_shows_some(setup: Setup) -> None:
    card = Card("GPU-a", gpm=None)
    sampler = over(ScriptedNvml(card), setup.feed)
    card.errors["*"] = pynvml.NVML_ERROR_GPU_IS_LOST
    (sample,) = sampler.sample(1.0)
    assert (sample.fault is not None, sample.activity.sm_active) == (True, None)


def test_the_instances_of_a_card_in_mig_mode_are_read_by_their_numbers() -> None:
    instances = {0: (0.1, 0.2, 0.3, 0.4, 0.5), 1: (0.5, 0.6, 0.7, 0.8, 0.9)}
    setup = Setup(scripted_dcgm.Card("GPU-a", instances=instances))
    split = [Card("MIG-1", total_mib=5000, reserved_mib=0), Card("MIG-2", total_mib=5000, reserved_mib=0)]
    sampler = over(ScriptedNvml(Card("GPU-a", gpm=None, mig=split)), setup.feed)
    assert [gpu.capabilities.source for gpu in sampler.gpus()] == ["dcgm", "dcgm"]
    assert [sample.activity.sm_active for sample in sampler.sample(1.0)] == [0.2, 0.6]
    sampler.close()


def test_a_value_that_is_not_renewed_is_soon_missing(setup: Setup) -> None:
    hung, resume = threading.Event(), threading.Event()

    class Hanging(HostEngine):
        def read(self, places: Iterable[Place]) -> dict[Place, Activity]:
            found = super().read(places)
            if setup.feed.offers(A):  # the second reading hangs, as one does whose host engine was stopped
                hung.set()
                resume.wait(LIMIT_S)
            return found

    engine = Hanging(lambda: setup.dcgm, wall=lambda: setup.dcgm.now)
    setup.feed = DcgmThread(engine, period_s=0.002, first_s=LIMIT_S, monotonic=lambda: setup.monotonic)
    sampler = over(ScriptedNvml(Card("GPU-a", gpm=None, used_mib=10)), setup.feed)
    assert hung.wait(LIMIT_S)
    assert sampler.sample(0.0)[0].activity.sm_active == 0.25
    setup.monotonic += FRESH_S
    (sample,) = sampler.sample(FRESH_S)
    assert (sample.activity.sm_active, sample.memory_used_mib) == (None, 10)
    resume.set()


def test_the_thread_survives_an_unexpected_exception(setup: Setup) -> None:
    class Broken(HostEngine):
        calls = 0

        def read(self, places: Iterable[Place]) -> dict[Place, Activity]:
            Broken.calls += 1
            if Broken.calls == 1:
                raise ValueError("a surprise")
            return super().read(places)

    setup.feed = DcgmThread(Broken(lambda: setup.dcgm, wall=lambda: setup.dcgm.now), period_s=0.002, first_s=LIMIT_S)
    setup.feed.watch([A])
    eventually(lambda: setup.feed.offers(A))


def test_a_start_waits_for_the_first_values_and_not_only_for_the_connection() -> None:
    setup = Setup(scripted_dcgm.Card("GPU-a", status=NO_DATA))
    threading.Timer(0.05, lambda: setattr(setup.dcgm.cards[0], "status", 0)).start()
    sampler = over(ScriptedNvml(Card("GPU-a", gpm=None)), setup.feed)
    assert sampler.gpus()[0].capabilities.source == "dcgm"
    sampler.close()


def test_closing_the_sampler_ends_the_thread_and_hangs_up(setup: Setup) -> None:
    sampler = over(ScriptedNvml(Card("GPU-a", gpm=None)), setup.feed)
    sampler.close()
    sampler.close()
    eventually(lambda: setup.dcgm.closed)
    connects = setup.dcgm.connects
    setup.feed.watch([A])  # too late: it would wait for the first reading, which connects
    assert setup.dcgm.connects == connects

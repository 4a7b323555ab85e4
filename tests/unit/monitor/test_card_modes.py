"""The modes of cards, over a scripted NVML."""

from __future__ import annotations

from typing import Any

import pynvml
import pytest

from carma.errors import NoGpus
from carma.monitor.card_modes import machine_facts
from tests.scripted_nvml import Card, ScriptedNvml


class ScriptedModes(ScriptedNvml):
    """Scripted NVML with the functions that only carma doctor calls."""

    compute_mode = 0
    persistence = 1

    def nvmlSystemGetNVMLVersion(self) -> str:
        return "13.580.159"

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13000

    def nvmlDeviceGetComputeMode(self, handle: Any) -> int:
        self._card("nvmlDeviceGetComputeMode", handle)
        return self.compute_mode

    def nvmlDeviceGetPersistenceMode(self, handle: Any) -> int:
        self._card("nvmlDeviceGetPersistenceMode", handle)
        return self.persistence


def test_the_facts_of_a_card_are_asked_and_nvml_is_closed_again() -> None:
    nvml = ScriptedModes(Card("GPU-a"), Card("GPU-b", mig=[Card("MIG-1"), Card("MIG-2")]))
    facts = machine_facts(nvml)
    assert (facts.driver, facts.nvml, facts.cuda) == ("580.159.04", "13.580.159", "13.0")
    plain, sliced = facts.cards
    assert (plain.compute_mode, plain.persistence, plain.mig, plain.gpm) == ("default", True, False, "offered")
    assert (sliced.mig, sliced.mig_pending, sliced.instances) == (True, True, 2)
    assert nvml.snapshots == 0
    with pytest.raises(pynvml.NVMLError):  # it was shut down
        nvml.nvmlDeviceGetCount()


def test_facts_that_a_driver_does_not_give_are_absent() -> None:
    (card,) = machine_facts(ScriptedNvml(Card("GPU-a", gpm=None))).cards
    assert (card.compute_mode, card.persistence, card.gpm, card.fault) == (None, None, "absent", "")


def test_a_forbidden_counter_and_an_absent_one_are_distinguished() -> None:
    forbidden = Card("GPU-a", errors={"nvmlGpmSampleGet": pynvml.NVML_ERROR_NO_PERMISSION})
    (card,) = machine_facts(ScriptedModes(forbidden)).cards
    assert card.gpm == "forbidden"


def test_a_lost_card_does_not_hide_the_others() -> None:
    lost = Card("GPU-a", errors={"*": pynvml.NVML_ERROR_GPU_IS_LOST})
    first, second = machine_facts(ScriptedModes(lost, Card("GPU-b"))).cards
    assert "does not answer" in first.fault
    assert second.fault == ""


def test_a_driver_that_does_not_answer_is_no_gpus() -> None:
    nvml = ScriptedModes()
    nvml.init_error = pynvml.NVML_ERROR_DRIVER_NOT_LOADED
    with pytest.raises(NoGpus):
        machine_facts(nvml)

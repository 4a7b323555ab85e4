"""Output of programs that MPS failed, and output that only looks like it."""

from __future__ import annotations

import signal

import pytest

from carma.core.model.outcome import Disrupted, Failed, OutOfMemory, Succeeded
from carma.launch.exit_outcome import ExitRecord, LastWords, MpsState, StopRecord, judge_exit
from carma.launch.failure_signs import find_mps_failure
from tests.unit.launch.test_oom_signs import FRAMES, TORCH

UNDER = MpsState(used=True)
LOST = MpsState(used=True, lost=True)
TEXTS = [  # cudaGetErrorString, 805 to 810
    "MPS client failed to connect to the MPS control daemon or the MPS server",
    "the remote procedural call between the MPS server and the MPS client failed",
    "MPS server is not ready to accept new MPS client requests",
    "the hardware resources required to create MPS client have been exhausted",
    "the hardware resources required to support device connections have been exhausted",
    "the MPS client has been terminated by the server",
]
TAIL = "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be\n"
SIGNS = [
    *(f"{FRAMES}torch.AcceleratorError: CUDA error: {text}\n{TAIL}" for text in TEXTS),
    *(f"{FRAMES}RuntimeError: CUDA error: {text}\n{TAIL}" for text in TEXTS),
    f"{FRAMES}RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling"
    f" NumCudaDevices() that might have already set an error? Error 805: {TEXTS[0]}\n",
    f"{FRAMES}cupy_backends.cuda.api.runtime.CUDARuntimeError: cudaErrorMpsRpcFailure: {TEXTS[1]}\n",
    f"{FRAMES}jaxlib.xla_extension.XlaRuntimeError: INTERNAL: CUDA_ERROR_MPS_CLIENT_TERMINATED: terminated\n",
    f"terminate called after throwing an instance of 'c10::AcceleratorError'\n  what():  CUDA error: {TEXTS[5]}\n",
    f"CUDA error: {TEXTS[1]}\n",
    f"GPUassert: {TEXTS[1]} main.cu 31\n",
    f"{FRAMES}RuntimeError: CUDA error: {TEXTS[1]}\n{FRAMES}SystemExit: 1\n",
]
NEAR_MISSES = [
    "",
    f"/x/torch/cuda/__init__.py:107: UserWarning: CUDA initialization: Error 805: {TEXTS[0]} (Triggered at x.cpp)\n",
    f"WARNING: CUDA error: {TEXTS[0]}\n",
    f"{FRAMES}RuntimeError: CUDA error: {TEXTS[1]}\nretrying\n{FRAMES}KeyError: 'loss'\n",
    f"{FRAMES}RuntimeError: CUDA error: an illegal memory access was encountered\n",
    f"{FRAMES}FileNotFoundError: [Errno 2] No such file or directory: '/data/mps/client'\n",
    "the MPS client has been terminated by the server\n",
]
CODE_1 = ExitRecord(100.0, code=1)


@pytest.mark.parametrize("text", SIGNS)
def test_a_failure_of_mps_disrupts_what_ran_under_it(text: str) -> None:
    outcome = judge_exit(CODE_1, LastWords(text, ""), None, UNDER)
    assert isinstance(outcome, Disrupted)
    assert "MPS" in outcome.reason or "Mps" in outcome.reason
    assert judge_exit(CODE_1, LastWords("", text), None, UNDER) == outcome


@pytest.mark.parametrize("text", SIGNS)
def test_what_ran_elsewhere_failed_by_itself(text: str) -> None:
    assert isinstance(judge_exit(CODE_1, LastWords(text, "")), Failed)


@pytest.mark.parametrize("text", NEAR_MISSES)
def test_what_only_looks_like_it(text: str) -> None:
    assert find_mps_failure(text) == ""
    assert isinstance(judge_exit(CODE_1, LastWords(text, ""), None, UNDER), Failed)


def test_a_client_is_disrupted_by_the_end_of_its_server_whatever_it_prints() -> None:
    text = FRAMES + "RuntimeError: CUDA error: unknown error\n"
    outcome = judge_exit(CODE_1, LastWords(text, ""), None, LOST)
    assert outcome == Disrupted("its MPS server ended (RuntimeError: CUDA error: unknown error)")
    bus_error = judge_exit(ExitRecord(100.0, signal=signal.SIGBUS), LastWords("", ""), None, LOST)
    assert bus_error == Disrupted("its MPS server ended (ended by SIGBUS)")


def test_a_success_stays_one_and_memory_that_ran_out_too() -> None:
    assert judge_exit(ExitRecord(100.0, code=0), LastWords("", ""), None, LOST) == Succeeded()
    assert isinstance(judge_exit(CODE_1, LastWords(FRAMES + TORCH, ""), None, LOST), OutOfMemory)


def test_an_attempt_that_was_asked_to_end_is_not_disrupted() -> None:
    stop = StopRecord(signal.SIGTERM, 99.0)
    assert isinstance(judge_exit(CODE_1, LastWords(SIGNS[0], ""), stop, LOST), Failed)


def test_what_never_started_was_not_disrupted() -> None:
    record = ExitRecord(100.0, code=127, message="cannot start x: not found")
    assert judge_exit(record, LastWords("", ""), None, LOST) == Failed(127, "cannot start x: not found")


@pytest.mark.parametrize(
    ("allowed", "held"), [("4.00 GiB allowed; ", "3.51 GiB"), ("512.00 MiB allowed; ", "498.00 MiB")]
)
def test_an_oom_under_a_cap_is_an_oom_with_its_figures(allowed: str, held: str) -> None:
    text = TORCH.replace("33.37 GiB memory in use. ", f"{held} memory in use. {allowed}")
    assert allowed in text
    outcome = judge_exit(CODE_1, LastWords(FRAMES + text, ""), None, UNDER)
    assert isinstance(outcome, OutOfMemory)
    assert outcome.asked_mib == 2048
    assert outcome.peak_mib == {"3.51 GiB": 3595, "498.00 MiB": 498}[held]

"""No figure, and why: each in words that tell what happened."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from carma.trial.protocol import Trial
from tests.estimating.trying import Trying, stopped

_STEP = """
import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(4, 8).cuda()).sum().backward()
optimizer.step()
"""


def test_a_cuda_extension_of_its_own(trying: Trying) -> None:
    how, reason = stopped(
        trying.script("""
import torch
from torch.utils.cpp_extension import load_inline
fast = load_inline(name="fast_op", cpp_sources="", cuda_sources="__global__ void k() {}", functions=["k"])
""")
    )
    assert how == "unsupported"
    assert "fast_op" in reason
    assert "extension" in reason


def test_an_extension_that_is_compiled_for_cuda(trying: Trying) -> None:
    words = "libcudart.so.13: cannot open shared object file: No such file or directory"
    how, reason = stopped(trying.script(f"import torch\nraise ImportError({words!r})"))
    assert how == "unsupported"
    assert reason.startswith("the script loads an extension that is compiled for CUDA")


@pytest.mark.parametrize(
    ("compiler", "words"), [("/bin/false", "/bin/false ended with code 1"), ("no-such-compiler", "'no-such-compiler'")]
)
def test_a_compiler_that_does_not_compile(trying: Trying, tmp_path: Path, compiler: str, words: str) -> None:
    folder = trying.folder()
    (folder / "train.py").write_text(_STEP)
    nothing_built = Trying(tmp_path, tmp_path / "compiled")
    command = (sys.executable, "train.py")
    how, reason = stopped(nothing_built.run_in(folder, *command, environment={"CXX": compiler}))
    assert how == "unsupported"
    assert reason.startswith("the trial's part in C++ does not compile against this torch: ")
    assert words in reason


def test_an_operator_that_nobody_knows_is_named(trying: Trying) -> None:
    how, reason = stopped(
        trying.script("""
import torch
library = torch.library.Library("own", "DEF")
library.define("mix(Tensor x) -> Tensor")
torch.ops.own.mix(torch.zeros(3).cuda())
""")
    )
    assert how == "unsupported"
    assert reason == "a trial does not know the operator own::mix (train.py:5)"


def test_an_operator_without_shapes_is_named_where_its_values_are_unknown(trying: Trying) -> None:
    text = """
import torch
library = torch.library.Library("own", "DEF")
library.define("mix(Tensor x) -> Tensor")
library.impl("mix", lambda x: x + 1, "CPU")
assert torch.ops.own.mix(torch.zeros(3).cuda()).tolist() == [1, 1, 1]
torch.ops.own.mix(torch.zeros(300, 300).cuda())
"""
    reason = "a trial does not know the operator own::mix (train.py:7)"
    assert stopped(trying.script(text)) == ("unsupported", reason)


_BOXES = """
import os, torch
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.impl("nms", lambda boxes, scores, overlap: torch.tensor([1, 0]), "CPU")
torch.ops.load_library(os.path.join(torch.__path__[0], "lib", "libc10.so"))
boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 3.0]])
"""


def test_boxes_that_are_picked_by_unknown_scores(trying: Trying) -> None:
    text = _BOXES + "torch.ops.torchvision.nms(torch.rand(5000, 4).cuda(), torch.rand(5000).cuda(), 0.5)"
    reason = "the model picks boxes by their scores (nms), which only a GPU knows"
    assert stopped(trying.script(text)) == ("unsupported", reason)


def test_boxes_that_are_picked_by_known_scores(trying: Trying) -> None:
    text = _BOXES + "raise ValueError(torch.ops.torchvision.nms(boxes.cuda(), torch.ones(3).cuda(), 0.5).tolist())"
    assert stopped(trying.script(text)) == ("error", "ValueError: [1, 0] (train.py:8)")


def test_an_endless_loop_is_ended_at_the_limit(trying: Trying) -> None:
    how, reason = stopped(trying.script("import torch\nwhile True: torch.zeros(3).cuda()", limit_s=15))
    assert how == "none"
    assert "ended at its limit of 15 s, before" in reason


def test_how_far_it_came_is_known_when_it_is_killed(trying: Trying) -> None:
    how, reason = stopped(trying.script(_STEP + "import os\nos.kill(os.getpid(), 9)"))
    assert how == "none"
    assert "SIGKILL after 1 optimizer step" in reason


def test_a_script_that_crashes_tells_its_own_error_and_line(trying: Trying) -> None:
    how, reason = stopped(trying.script("import torch\ntorch.zeros(3).cuda()\nopen('no such file')"))
    assert how == "error"
    assert reason == "FileNotFoundError: [Errno 2] No such file or directory: 'no such file' (train.py:3)"


def test_an_error_of_shapes_is_the_scripts_own(trying: Trying) -> None:
    how, reason = stopped(trying.script("import torch\ntorch.zeros(3, 4).cuda() @ torch.zeros(3, 4).cuda()"))
    assert how == "error"
    assert "(train.py:2)" in reason


def test_a_script_that_exits_with_words(trying: Trying) -> None:
    how, reason = stopped(trying.script("import sys, torch\ntorch.zeros(3).cuda()\nsys.exit('no data here')"))
    assert how == "error"
    assert "before an optimizer step: no data here" in reason


def test_a_download_is_refused_with_what_to_do(trying: Trying) -> None:
    how, reason = stopped(
        trying.script("import torch, urllib.request\nurllib.request.urlopen('http://data.example.org/weights.pt')")
    )
    assert how == "error"
    assert "no network: download it once" in reason


def test_a_script_without_a_gpu(trying: Trying) -> None:
    text = _STEP.replace(".cuda()", "")
    assert stopped(trying.script(text)) == ("end", "it never used a GPU")


def test_an_endless_training_on_the_cpu_is_seen_early(trying: Trying) -> None:
    text = _STEP.replace(".cuda()", "").replace("optimizer.step()", "while True: optimizer.step()")
    assert stopped(trying.script(text)) == ("end", "it never used a GPU")


def test_no_training_at_all_ends_by_itself(trying: Trying) -> None:
    trial = trying.run(sys.executable, "inference.py")
    assert isinstance(trial, Trial)
    assert (trial.report.stop, trial.report.steps) == ("end", 0)
    assert trial.report.reason == "the script ended by itself before an optimizer step"
    assert trial.events


def test_too_few_steps_are_told(trying: Trying) -> None:
    trial = trying.script(_STEP)
    assert isinstance(trial, Trial)
    assert (trial.report.stop, trial.report.steps) == ("end", 1)
    assert "after 1 optimizer step" in trial.report.reason


def test_an_optimizer_that_keeps_what_its_values_ask_for(trying: Trying) -> None:
    reason = "LBFGS keeps up to 100 pairs of gradients, as many as its values ask for"
    assert stopped(trying.run(sys.executable, "encoder.py", "--optimizer", "LBFGS")) == ("unsupported", reason)

"""Trial runs without a figure: each reports its code, and a reason that names what it is about."""

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
_OWN = """
import os, torch
library = torch.library.Library("own", "DEF")
library.define("mix(Tensor x) -> Tensor")
"""
_NMS = """
library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.impl("nms", lambda boxes, scores, overlap: torch.tensor([1, 0]), "CPU")
torch.ops.load_library(os.path.join(torch.__path__[0], "lib", "libc10.so"))
nms = torch.ops.torchvision.nms
"""


def test_a_cuda_extension_of_the_script_is_named(trying: Trying) -> None:
    found = stopped(
        trying.script("""
import torch
from torch.utils.cpp_extension import load_inline
fast = load_inline(name="fast_op", cpp_sources="", cuda_sources="__global__ void k() {}", functions=["k"])
""")
    )
    assert found.stop == "unsupported"
    assert "fast_op" in found.reason


@pytest.mark.parametrize(
    ("compiler", "words"), [("/bin/false", "/bin/false ended with code 1"), ("no-such-compiler", "'no-such-compiler'")]
)
def test_a_compiler_that_does_not_compile_is_named(trying: Trying, tmp_path: Path, compiler: str, words: str) -> None:
    folder = trying.folder()
    (folder / "train.py").write_text(_STEP)
    nothing_built = Trying(tmp_path, tmp_path / "compiled")
    command = (sys.executable, "train.py")
    found = stopped(nothing_built.run_in(folder, *command, environment={"CXX": compiler}))
    assert found.stop == "unsupported"
    assert words in found.reason


def test_an_operator_without_any_kernel_is_named_with_its_line(trying: Trying) -> None:
    found = stopped(trying.script(_OWN + "torch.ops.own.mix(torch.zeros(3).cuda())"))
    assert found.stop == "unsupported"
    assert "own::mix (train.py:5)" in found.reason


def test_operators_are_computed_from_known_values_and_refused_without(trying: Trying) -> None:
    """One script: boxes and a result whose values are known, then a tensor that is too large to have values."""
    text = f"""{_OWN}own = library{_NMS}
own.impl("mix", lambda x: x + 1, "CPU")
boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 3.0]])
assert nms(boxes.cuda(), torch.ones(3).cuda(), 0.5).tolist() == [1, 0]
assert torch.ops.own.mix(torch.zeros(3).cuda()).tolist() == [1, 1, 1]
torch.ops.own.mix(torch.zeros(300, 300).cuda())
"""
    found = stopped(trying.script(text))
    assert found.stop == "unsupported", found
    assert "own::mix (train.py:" in found.reason


def test_boxes_that_are_selected_by_unknown_scores_are_refused(trying: Trying) -> None:
    text = f"import os, torch{_NMS}nms(torch.rand(5000, 4).cuda(), torch.rand(5000).cuda(), 0.5)"
    found = stopped(trying.script(text))
    assert found.stop == "unsupported"
    assert "nms" in found.reason


def test_an_endless_loop_ends_at_the_time_limit(trying: Trying) -> None:
    found = stopped(trying.script("import torch\nwhile True: torch.zeros(3).cuda()", limit_s=4))
    assert (found.stop, found.cause) == ("none", "time")
    assert "4 s" in found.reason


def test_a_killed_script_reports_its_signal_and_its_steps(trying: Trying) -> None:
    found = stopped(trying.script(_STEP + "import os\nos.kill(os.getpid(), 9)"))
    assert (found.stop, found.cause) == ("none", "crashed")
    assert "SIGKILL after 1 optimizer step" in found.reason


def test_a_script_that_crashes_reports_its_own_error_and_line(trying: Trying) -> None:
    found = stopped(trying.script("import torch\ntorch.zeros(3).cuda()\nopen('no such file')"))
    reason = "FileNotFoundError: [Errno 2] No such file or directory: 'no such file' (train.py:3)"
    assert found == ("error", "crashed", reason)


def test_an_error_of_shapes_is_the_scripts_own(trying: Trying) -> None:
    found = stopped(trying.script("import torch\ntorch.zeros(3, 4).cuda() @ torch.zeros(3, 4).cuda()"))
    assert found.stop == "error"
    assert "(train.py:2)" in found.reason


def test_a_script_that_exits_with_a_message_reports_it(trying: Trying) -> None:
    found = stopped(trying.script("import sys, torch\ntorch.zeros(3).cuda()\nsys.exit('no data here')"))
    assert (found.stop, found.cause) == ("error", "crashed")
    assert found.reason.endswith("no data here")


def test_a_training_on_the_cpu_never_used_a_gpu_and_is_not_waited_for(trying: Trying) -> None:
    text = _STEP.replace(".cuda()", "")
    assert stopped(trying.script(text))[:2] == ("end", "no_gpu")
    endless = text.replace("optimizer.step()", "while True: optimizer.step()")
    assert stopped(trying.script(endless))[:2] == ("end", "no_gpu")


def test_a_script_without_a_training_ends_by_itself(trying: Trying) -> None:
    trial = trying.run(sys.executable, "inference.py")
    assert isinstance(trial, Trial)
    assert (trial.report.stop, trial.report.cause, trial.report.steps) == ("end", "", 0)
    assert trial.events


def test_a_script_with_one_step_reports_the_number_of_steps(trying: Trying) -> None:
    trial = trying.script(_STEP)
    assert isinstance(trial, Trial)
    assert (trial.report.stop, trial.report.steps) == ("end", 1)
    assert "1 optimizer step" in trial.report.reason


def test_an_optimizer_whose_state_depends_on_values_is_refused(trying: Trying) -> None:
    found = stopped(trying.run(sys.executable, "encoder.py", "--optimizer", "LBFGS"))
    assert found.stop == "unsupported"
    assert "LBFGS keeps up to 100" in found.reason

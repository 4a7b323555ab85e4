"""What a trial run reports about a model besides its layers: formats, heads, kind of attention, passes in a step."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import carma.trial
from carma.trial.layers.description import Described
from carma.trial.replay.library_memory import with_attention
from tests.estimating.trying import Trying, stepped

# Each case runs in a fork of one interpreter that has imported torch, on the CPU: descriptions need no emulated GPU.
CASES = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch
import torch._dynamo  # once: each optimizer would import it in its fork
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from carma_trial import describe, report


def network(width=32):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 8))


def images():
    return torch.randn(16, 3, 32, 32)


def run(body):
    describe.install()
    net = network()
    names = {**globals(), "net": net, "checkpoint": torch.utils.checkpoint.checkpoint}
    setup, _, step = body.rpartition("---")
    exec(setup, names)
    optimizer = torch.optim.SGD(names["net"].parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        exec(step, names)
        optimizer.step()
        describe.optimizer([optimizer])
        names["net"](images()).mean()  # the script calls its model between steps, with gradients on
    return report.facts["described"]


for name, body in json.load(sys.stdin).items():
    reading, writing = os.pipe()
    if os.fork() == 0:
        os.write(writing, json.dumps({name: run(body)}).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as answer:
        print(answer.read(), flush=True)
    os.wait()
"""
ONE = "net(images()).sum().backward()"
FROZEN = "judge = nn.Linear(8, 8).requires_grad_(False)\n---"
BODIES = {
    "one call": ONE,
    "accumulated": f"for _ in range(4):\n    {ONE}",
    "three calls": "F.triplet_margin_loss(net(images()), net(images()), net(images())).backward()",
    "recomputed": "for _ in range(2):\n    checkpoint(net, images(), use_reentrant=False).sum().backward()",
    "without gradients": "with torch.no_grad():\n    goal = net(images())\nF.mse_loss(net(images()), goal).backward()",
    "frozen after": f"{FROZEN}judge(net(images())).sum().backward()",
    "frozen before": f"{FROZEN}net(images() + judge(torch.ones(1, 8)).sum()).sum().backward()",
    "two networks": f"second = network()\n---second(images()).sum().backward()\n{ONE}",
    "channels last": f"net = net.to(memory_format=torch.channels_last)\n---{ONE}",
}


@pytest.fixture(scope="module")
def cases() -> dict[str, Described]:
    pytest.importorskip("torch")
    inside = str(Path(carma.trial.__file__).parent / "inside")
    command = [sys.executable, "-c", CASES, inside]
    printed = subprocess.run(command, input=json.dumps(BODIES), capture_output=True, text=True, check=True).stdout
    found: dict[str, Described] = {}
    for line in printed.splitlines():
        found |= msgspec.json.decode(line, type=dict[str, Described])
    return found


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("one call", 1),
        ("accumulated", 1),  # a backward pass after each call releases its outputs
        ("three calls", 3),
        ("recomputed", 1),
        ("without gradients", 1),
        ("frozen after", 2),  # between the model and the loss: its outputs are kept
        ("frozen before", 1),
        ("two networks", 2),
    ],
)
def test_the_number_of_passes_that_a_step_keeps(cases: dict[str, Described], name: str, passes: int) -> None:
    assert cases[name].passes == passes


def test_recomputation_is_reported(cases: dict[str, Described]) -> None:
    assert [name for name, found in cases.items() if found.checkpointing] == ["recomputed"]


def test_the_memory_format_is_that_of_the_kernels(cases: dict[str, Described]) -> None:
    assert [name for name, found in cases.items() if found.channels_last] == ["channels last"]
    assert (cases["one call"].heads, cases["one call"].attention) == (None, "")


def described(trying: Trying, script: str) -> Described:
    trial = stepped(trying.script(script))
    found = trial.report.described
    assert found is not None
    return with_attention(found, trial)


def test_a_gan_in_a_trial_run_keeps_three_passes(trying: Trying) -> None:
    found = trying.python("gan.py", "1").report.described
    assert found is not None
    assert found.passes == 3  # the generator, and the critic twice


ATTENTION = """
import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.n_heads = heads
        self.inner, self.outer = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.inner(x).view(batch, length, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        out = attend(q, k, v)
        return self.outer(out.transpose(1, 2).reshape(batch, length, width))


def eager(q, k, v):
    return torch.softmax(q @ k.mT, -1) @ v


def windows(q, k, v):
    return eager(*(each.unflatten(2, (-1, 4)) for each in (q, k, v))).flatten(2, 3)


attend = ATTEND
net = nn.Sequential(Attention(64, 4), nn.LayerNorm(64), Attention(64, 4), nn.Linear(64, 5)).cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(10):
    net(torch.randn(8, 128, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_attention_that_writes_its_scores_out(trying: Trying) -> None:
    found = described(trying, ATTENTION.replace("ATTEND", "eager"))
    assert (found.attention, found.heads) == ("eager", 4)


def test_attention_by_torchs_function(trying: Trying) -> None:
    found = described(trying, ATTENTION.replace("ATTEND", "F.scaled_dot_product_attention"))
    assert (found.attention, found.heads) == ("sdpa", 4)


def test_attention_within_windows_is_neither(trying: Trying) -> None:
    found = described(trying, ATTENTION.replace("ATTEND", "windows"))
    assert (found.attention, found.heads) == ("", 4)

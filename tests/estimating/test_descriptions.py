"""What a trial tells of a model besides its layers: formats, heads, how attention is computed, calls in a step."""

from __future__ import annotations

from carma.core.model.values import NoEstimate
from carma.trial.layers.description import Described
from carma.trial.replay.attention_scores import with_attention
from tests.estimating.trying import Trying, stepped

HEAD = """
import sys
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def network(width=32):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 8))


def images():
    return torch.randn(16, 3, 32, 32, device="cuda")


net = network().cuda()
"""
TAIL = """
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(10):
    optimizer.zero_grad()
    step()
    optimizer.step()
    print(float(net(images()).mean()), flush=True)  # a look at it, with gradients on
"""


def described(trying: Trying, script: str) -> Described:
    trial = stepped(trying.script(script))
    assert not isinstance(trial, NoEstimate)
    found = trial.report.described
    assert found is not None
    return with_attention(found, trial)


def step(body: str) -> str:
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return f"{HEAD}\ndef step():\n{lines}\n{TAIL}"


def test_one_call_and_one_backward_pass(trying: Trying) -> None:
    found = described(trying, step("net(images()).sum().backward()"))
    assert found.passes == 1
    assert (found.channels_last, found.heads, found.attention) == (False, None, "")


def test_calls_that_are_accumulated_are_one(trying: Trying) -> None:
    assert described(trying, step("for _ in range(4):\n    net(images()).sum().backward()")).passes == 1


def test_three_calls_before_a_backward_pass(trying: Trying) -> None:
    body = "F.triplet_margin_loss(net(images()), net(images()), net(images())).backward()"
    assert described(trying, step(body)).passes == 3


def test_what_is_computed_again_is_no_call(trying: Trying) -> None:
    body = "for _ in range(2):\n    checkpoint(net, images(), use_reentrant=False).sum().backward()"
    found = described(trying, step(body))
    assert (found.passes, found.checkpointing) == (1, True)


def test_a_call_without_gradients_does_not_count(trying: Trying) -> None:
    body = "with torch.no_grad():\n    goal = net(images())\nF.mse_loss(net(images()), goal).backward()"
    assert described(trying, step(body)).passes == 1


def test_a_frozen_network_between_the_model_and_the_loss_counts(trying: Trying) -> None:
    frozen = "judge = nn.Linear(8, 8).cuda().requires_grad_(False)\n"
    through = step("judge(net(images())).sum().backward()").replace("\ndef step", frozen + "\ndef step")
    assert described(trying, through).passes == 2
    before = step("net(images() + judge(torch.ones(1, 8, device='cuda')).sum()).sum().backward()")
    assert described(trying, before.replace("\ndef step", frozen + "\ndef step")).passes == 1


def test_two_networks_count_even_when_each_has_its_own_backward_pass(trying: Trying) -> None:
    other = "second = network().cuda()\n"
    body = step("second(images()).sum().backward()\nnet(images()).sum().backward()")
    assert described(trying, body.replace("\ndef step", other + "\ndef step")).passes == 2


def test_a_gan_has_more_than_one(trying: Trying) -> None:
    found = stepped(trying.python("gan.py")).report.described
    assert found is not None
    assert found.passes == 3  # the maker, and the critic twice


def test_the_memory_format_is_that_of_the_kernels(trying: Trying) -> None:
    body = step("net(images()).sum().backward()").replace(
        "net = network().cuda()", "net = network().cuda().to(memory_format=torch.channels_last)"
    )
    assert described(trying, body).channels_last


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

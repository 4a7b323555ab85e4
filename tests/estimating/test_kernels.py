"""Single operators in a trial take what they take on the GPU: sizes measured on an H200, found again in the events."""

from __future__ import annotations

import pytest

from carma.trial.report import ALLOC, read_events
from tests.estimating.trying import Trying, stepped

SCRIPT = """
import torch
import torch.nn.functional as F

cuda = {"device": "cuda"}


def grad_of(out, *inputs):
    torch.autograd.grad(out, inputs, torch.ones_like(out))


def inputs(*shape, **words):
    return torch.rand(*shape, **cuda, **words).requires_grad_()


F.mse_loss(torch.rand(1009, 1013, **cuda), torch.rand(1009, 1013, **cuda))
x = inputs(1003, 1019)
grad_of(x.softmax(-1), x)
weight = inputs(1000, 67)
grad_of(F.embedding(torch.randint(1000, (5000,), **cuda), weight), weight)
q = [inputs(2, 4, 131, 64) for _ in range(3)]
grad_of(F.scaled_dot_product_attention(*q), *q)
q = [inputs(3, 4, 137, 64, dtype=torch.bfloat16) for _ in range(3)]
grad_of(F.scaled_dot_product_attention(*q), *q)
table = inputs(169, 24)
grad_of(table[torch.randint(169, (2401,), **cuda)], table)
torch.rand(7, 11, 1021, **cuda).roll((1, 2), (0, 1))
F.layer_norm(torch.rand(1031, 96, **cuda).t(), [1031])
image = torch.rand(8, 64, 56, 56, dtype=torch.bfloat16, **cuda).to(memory_format=torch.channels_last)
torch.nn.BatchNorm2d(64).cuda().bfloat16()(image)
signal = inputs(5, 1039)
grad_of(torch.fft.rfft(signal).abs(), signal)
q = [inputs(2, 5, 139, 64) for _ in range(3)]
out = F.scaled_dot_product_attention(*q)
torch.autograd.grad(out, q, torch.ones(139, 2, 5, 64, **cuda).permute(1, 2, 0, 3))
flags = torch.rand(1033, 1049, **cuda) > 0.5
flags.sum()
x = inputs(1051, 1061, dtype=torch.bfloat16)
F.smooth_l1_loss(x, torch.rand(1051, 1061, dtype=torch.bfloat16, **cuda)).backward()
torch.rand(1063, 1000, **cuda).topk(8)
torch.rand(2**28, **cuda).sum()
torch.rand(2**30, **cuda).sum()
image = torch.rand(3, 5, 71, 73, **cuda).to(memory_format=torch.channels_last)
F.adaptive_max_pool2d(image, 7)
layer = torch.nn.TransformerEncoderLayer(64, 4, 132, batch_first=True).cuda().eval()
encoder = torch.nn.TransformerEncoder(layer, 1)
with torch.no_grad():
    encoder(torch.rand(3, 521, 64, **cuda))
    encoder(torch.rand(3, 523, 64, **cuda), src_key_padding_mask=torch.arange(3 * 523, **cuda).view(3, 523) % 523 > 400)

model = torch.nn.Linear(8, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.rand(4, 8, **cuda)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="session")
def sizes(trying: Trying) -> list[int]:
    trial = stepped(trying.script(SCRIPT))
    return [event.bytes for event in read_events(trial.events) if event.kind == ALLOC]


def test_a_loss_is_made_for_each_element_first(sizes: list[int]) -> None:
    assert sizes.count(1009 * 1013 * 4) == 2 + 2  # the inputs, the result's storage, the losses


def test_the_gradient_of_a_softmax_takes_a_product(sizes: list[int]) -> None:
    assert sizes.count(1003 * 1019 * 4) == 1 + 1 + 1 + 2  # input, result, ones, and gradient with the product


def test_the_gradient_of_an_embedding_is_summed_in_parts(sizes: list[int]) -> None:
    parts = 5000 // 10 + 1000
    assert sizes.count(parts * 67 * 4) == 1
    assert sizes.count(parts * 8) == 1


def test_attention_by_its_implementation(sizes: list[int]) -> None:
    blocks = 3  # of 64 rows
    assert sizes.count(2 * 4 * blocks * (16 + 64 * 64 * 4)) == 1  # memory-efficient, in float
    assert sizes.count(3 * 4 * 137 * 65 * 4 + 256) == 1  # cuDNN, in half


def test_gradients_that_are_added_by_index_are_sorted(sizes: list[int]) -> None:
    assert sizes.count(3583) == 1
    assert sizes.count(2401 * 8) == 1 + 5  # the indices; linear ones, twice, and what is sorted


def test_a_roll_goes_dimension_by_dimension(sizes: list[int]) -> None:
    assert sizes.count(7 * 11 * 1021 * 4) == 1 + 2


def test_a_norm_wants_its_input_plain(sizes: list[int]) -> None:
    assert sizes.count(1031 * 96 * 4) == 1 + 2


def test_batch_norm_with_channels_last_keeps_parts_of_its_sums(sizes: list[int]) -> None:
    assert sizes.count(4 * 64 * 98 * 4) == 1


def test_complex_results_are_seen_as_real_ones(sizes: list[int]) -> None:
    assert sizes.count(5 * (1039 // 2 + 1) * 8) >= 1


def test_the_gradient_of_attention_is_made_plain(sizes: list[int]) -> None:
    """Batch first as the kernel wants it, where the model has the length first."""
    assert sizes.count(2 * 5 * 139 * 64 * 4) == 3 + 1 + 1 + 1 + 4  # inputs, result, ones, copy, gradients and a product


def test_flags_are_counted_as_whole_numbers(sizes: list[int]) -> None:
    assert sizes.count(1033 * 1049 * 8) == 1


def test_the_gradient_of_a_loss_in_half_is_made_once(sizes: list[int]) -> None:
    assert sizes.count(1051 * 1061 * 2) == 2 + 2 + 1  # inputs; the result's storage, the losses; the gradient


def test_the_largest_of_many_rows_are_found_by_counting_digits(sizes: list[int]) -> None:
    assert sizes.count(1063 * (1024 + 512 + 28)) == 1


def test_what_32_bits_cannot_index_is_reduced_in_parts(sizes: list[int]) -> None:
    assert sizes.count(2**28 * 4) == 1
    assert sizes.count(2**30 * 4) == 1
    blocks = 2**28 // 512 // 256
    assert sizes.count(4 * blocks) == 2  # of a quarter as of the whole that is as large


def test_pooling_of_channels_last_copies(sizes: list[int]) -> None:
    assert sizes.count(3 * 5 * 71 * 73 * 4) == 3  # the image, in both orders, and the copy
    assert sizes.count(3 * 5 * 7 * 7 * 8) == 2


def test_the_fast_path_of_an_encoder_in_evaluation(sizes: list[int]) -> None:
    rows, padded = 3 * 521 * 4, 3 * 523 * 4
    assert (sizes.count(rows * 192), sizes.count(rows * 132)) == (1, 1)  # one product for all three, one wide layer
    assert sizes.count(rows * 64) == 1 + 5  # the input; attention, its projection, a norm, the narrow layer, a norm
    assert sizes.count(padded * 4 * 523) == 2  # a mask: scores and shares are whole
    assert sizes.count(padded * 192) == 2

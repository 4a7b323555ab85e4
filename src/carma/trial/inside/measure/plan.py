"""What is measured, in which order: pure, and the same for the same seed."""

from __future__ import annotations

import random
from typing import Any

from .conv_plan import convolutions

Params = dict[str, Any]

SEED = 4
# Cases, not rows: a convolution gives three rows.
BROAD = {"convolution": 12_000, "mode": 500, "attention": 500, "recurrent": 300}
QUICK = {"convolution": 2_500, "mode": 60, "attention": 120, "recurrent": 60}
HEAD_DIMS = [32, 64, 64, 64, 80, 96, 128, 128, 256]
LENGTHS = [64, 77, 128, 197, 256, 384, 512, 1000, 1024, 2048]


class Plan:
    """Cases in the order to take them; those that would disturb others are apart."""

    def __init__(self, cases: list[Params], apart: list[Params]) -> None:
        self.cases = cases
        self.apart = apart


def attention(rng: random.Random) -> Params:
    """One call of scaled dot product attention."""
    heads = rng.choice([1, 4, 6, 8, 12, 16, 20, 32])
    length = rng.choice(LENGTHS)
    mask = rng.choice(["none", "none", "none", "bool", "float", "float_heads"])
    batch = rng.choice([1, 2, 4, 8, 16, 32, 64])
    # The unfused path keeps several matrices of length x length a head.
    while batch > 1 and batch * heads * length * length * 4 > 1 << 30:
        batch //= 2
    return {
        "op": "attention",
        "n": batch,
        "heads": heads,
        "kv_heads": heads // 4 if heads % 4 == 0 and heads > 4 and rng.random() < 0.25 else heads,
        "length": length,
        "kv_length": length if rng.random() < 0.8 else rng.choice(LENGTHS[:8]),
        "head_dim": rng.choice(HEAD_DIMS),
        "dtype": rng.choice(["fp32", "bf16", "bf16", "fp16"]),
        "causal": mask == "none" and rng.random() < 0.5,
        "mask": mask,
        "dropout": rng.choice([0.0, 0.0, 0.1]),
        "transposed_input": rng.random() < 0.7,
    }


def recurrent(rng: random.Random) -> Params:
    """One recurrent network, forward and backward."""
    return {
        "op": "recurrent",
        "cell": rng.choice(["LSTM", "LSTM", "GRU", "RNN"]),
        "n": rng.choice([1, 8, 16, 20, 32, 64, 128, 256]),
        "length": rng.choice([5, 20, 35, 64, 100, 128, 256, 500]),
        "inputs": rng.choice([1, 28, 64, 100, 128, 200, 256, 300, 512, 650]),
        "hidden": rng.choice([10, 32, 64, 100, 128, 200, 256, 512, 650, 1024]),
        "layers": rng.choice([1, 1, 2, 2, 3, 4]),
        "bidirectional": rng.random() < 0.35,
        "dropout": rng.choice([0.0, 0.0, 0.2]),
        "batch_first": rng.random() < 0.5,
        "packed": rng.random() < 0.2,
        "projection": rng.random() < 0.05,
        "dtype": rng.choice(["fp32", "fp32", "fp16", "bf16"]),
        "tf32": rng.random() < 0.7,
    }


def make_plan(broad: bool, others: list[Params], seed: int = SEED) -> Plan:
    """The plan; ``others`` are the cases that the tables of operators and optimizers list.

    The order is shuffled, so that an early stop leaves a fair sample. What is not a convolution is less and cheaper:
    it comes in the first half.
    """
    rng = random.Random(seed)
    counts = BROAD if broad else QUICK
    convs = convolutions(rng, counts["convolution"])
    modes = convolutions(rng, 2 * counts["mode"])
    deterministic = [{**case, "mode": "deterministic"} for case in modes[::2]]
    benchmark = [{**case, "mode": "benchmark"} for case in modes[1::2]]
    small = [attention(rng) for _ in range(counts["attention"])]
    small += [recurrent(rng) for _ in range(counts["recurrent"])]
    small += others
    keyed = [(rng.random(), number, case) for number, case in enumerate(convs + deterministic)]
    keyed += [(rng.random() / 2, -1 - number, case) for number, case in enumerate(small)]
    return Plan([case for _, _, case in sorted(keyed, key=lambda entry: entry[:2])], benchmark)

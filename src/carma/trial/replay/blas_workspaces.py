"""What cuBLAS keeps: a workspace for each thread and stream that multiplies, made at its first product.

PyTorch gives it 32 MiB on Hopper and on Blackwell, 8.125 MiB elsewhere (`:4096:2:16:8`), unless CUBLAS_WORKSPACE_CONFIG
says otherwise; cuBLASLt, which adds a bias in the same kernel, has 1 MiB more. A card's measured figures go first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from carma.trial.replay.card_constants import Constants
from carma.trial.replay.replay import Scratch
from carma.trial.report import Call

MIB = 1 << 20
LARGE, SMALL = 32 * MIB, 8_519_680
LT = 1 * MIB


def blas_rules(
    constants: Constants | None, capability: tuple[int, int], environment: Mapping[str, str]
) -> dict[str, Callable[[Call], Scratch]]:
    configured = _configured(environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    plain, lt = _measured(constants, capability)
    if configured is not None:
        plain = configured
    product = Scratch(kept=(("blas", plain),) if plain else ())
    with_bias = Scratch(kept=(*product.kept, *((("blas_lt", lt),) if lt else ())))
    return {"blas": lambda _call: product, "blas_lt": lambda _call: with_bias}


def _measured(constants: Constants | None, capability: tuple[int, int]) -> tuple[int, int]:
    default = LARGE if capability >= (9, 0) else SMALL
    if constants is None or constants.capability != capability:
        return default, LT
    kept = constants.kept_once
    plain = kept.get("mm_fp32_forward", default)
    return plain, max(0, kept.get("linear_fp32_forward", plain + LT) - plain)


def _configured(text: str) -> int | None:
    """`:SIZE:COUNT:SIZE:COUNT…`, in KiB; None where it is not set, or not in that form."""
    if not re.fullmatch(r"(:\d+:\d+)+", text):
        return None
    numbers = [int(number) for number in text.split(":")[1:]]
    return sum(size * count for size, count in zip(numbers[::2], numbers[1::2], strict=True)) * 1024

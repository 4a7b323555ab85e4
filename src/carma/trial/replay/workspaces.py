"""Memory that libraries allocate for a call beside the tensors that a trial run shows: the `Workspaces` of a GPU.

cuDNN's are those of `conv_workspaces`. cuBLAS keeps one workspace for each thread and stream, allocated at its first
product: PyTorch gives it 32 MiB on Hopper and Blackwell, 8.125 MiB elsewhere (`:4096:2:16:8`), unless
CUBLAS_WORKSPACE_CONFIG sets another size. cuBLASLt, which adds a bias in the same kernel, has 1 MiB more. Measured
figures of the GPU take precedence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from carma.trial.replay import card_constants as constants
from carma.trial.replay.card_constants import Constants
from carma.trial.replay.conv_shapes import OPS as CONVOLUTIONS
from carma.trial.replay.conv_workspaces import ConvWorkspaces, shipped_convolutions
from carma.trial.replay.replay import NO_SCRATCH, Scratch
from carma.trial.report import Call

MIB = 1 << 20
LARGE, SMALL = 32 * MIB, 8_519_680
LT = 1 * MIB

Rule = Callable[[Call], Scratch]


class CardWorkspaces:
    """Of one card. A call of a kind without a rule takes nothing."""

    def __init__(self, convolutions: ConvWorkspaces | None = None, rules: Mapping[str, Rule] | None = None) -> None:
        self._convolutions = convolutions or shipped_convolutions()
        self._rules: dict[str, Rule] = {**dict.fromkeys(CONVOLUTIONS, self._convolution), **(rules or {})}

    @classmethod
    def of(cls, file: Path | None, rules: Mapping[str, Rule] | None = None) -> CardWorkspaces:
        """With what was measured on the card that a file of constants is about; the shipped rows are in the model."""
        if file is None or file.parent == constants.SHIPPED or not constants.rows_file(file).is_file():
            return cls(rules=rules)
        return cls(ConvWorkspaces.from_rows(constants.read_rows(constants.rows_file(file))), rules)

    def __call__(self, call: Call, thread: int, stream: int) -> Scratch:  # noqa: ARG002 (the protocol's names)
        rule = self._rules.get(call.op)
        return NO_SCRATCH if rule is None else rule(call)

    def _convolution(self, call: Call) -> Scratch:
        return Scratch(transient_bytes=self._convolutions(call), trial_bytes=self._convolutions.trial_bytes(call))


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

"""What libraries take for a call beside the tensors that a trial run shows: the `Workspaces` of `replay.py` for a card.

Each kind of call has a rule in a file of its own; this one only says which rule answers for which kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from carma.trial.replay import card_constants as constants
from carma.trial.replay.conv_shapes import OPS as CONVOLUTIONS
from carma.trial.replay.conv_workspaces import ConvWorkspaces, shipped_convolutions
from carma.trial.replay.replay import NO_SCRATCH, Scratch
from carma.trial.report import Call

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

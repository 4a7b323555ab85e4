"""What the readers of summaries hand on: the model, and what its reader should know of how it was read."""

from __future__ import annotations

from carma.core.model import Record
from carma.estimate.described import Described


class Read(Record, frozen=True, kw_only=True):
    described: Described
    remarks: tuple[str, ...] = ()  # where the description is less sure than it looks; each a sentence without its dot
    gaps: tuple[str, ...] = ()  # what the summary leaves out, and how to print it whole: also said beside a refusal
    frozen: int = 0  # parameters that are not trained
    is_partial: bool = False  # layers that training has may be missing, so that no bound would hold

"""The reference page of errors and outcomes, from their classes."""

from __future__ import annotations

import typing

import msgspec

from carma.core.model.outcome import Outcome
from carma.errors import every
from tools.markdown import GENERATED, code, paragraphs, table

INTRODUCTION = """\
# Errors and outcomes

An error states what was tried and why it failed, and usually has a hint with the next step. On a terminal:

```console
$ carma show 99
carma: there is no task 99
  hint: …
```

Programs should use the code, which is stable; the API returns it in a [Problem](api.md#problem).

## Errors
"""
OUTCOMES = """\
## Outcomes

The end of an attempt or a task, in the field `outcome` of a [TaskView](api.md#taskview). `carma wait` returns the exit
code of the program if it has one, otherwise 130 for a cancelled task, 124 for a reached time limit and 1 for the rest.
"""


def page() -> str:
    rows = [
        [code(kind.code), str(kind.exit_code), str(kind.http_status), paragraphs(kind.__doc__ or "")]
        for kind in every()
        if kind.__module__ == "carma.errors"
    ]
    errors = table(["code", "exit code", "HTTP status", "meaning"], rows)
    outcomes = [_outcome(kind) for kind in typing.get_args(Outcome)]
    return "\n".join([GENERATED, INTRODUCTION, errors, OUTCOMES, table(["kind", "fields", "meaning"], outcomes)])


def _outcome(kind: type[msgspec.Struct]) -> list[str]:
    fields = ", ".join(code(field.encode_name) for field in msgspec.structs.fields(kind))
    return [code(str(kind.__struct_config__.tag)), fields, paragraphs(kind.__dict__.get("__doc__"))]

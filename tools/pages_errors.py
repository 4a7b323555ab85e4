"""The page of errors and outcomes, from their two trees."""

from __future__ import annotations

import typing

import msgspec

from carma.core.model.outcome import Outcome
from carma.errors import every
from tools.markdown import MADE, code, paragraphs, table

INTRODUCTION = """\
# Errors and outcomes

Every error says what was tried and why it failed, and most have a hint with the next step. At the terminal:

```console
$ carma show 99
carma: there is no task 99
  hint: …
```

The code is stable, and is what programs should look at; the API answers with it as a [Problem](api.md#problem).

## Errors
"""
OUTCOMES = """\
## Outcomes

How an attempt or a task ended, as `outcome` of a [TaskView](api.md#taskview). `carma wait` returns the exit code: that
of the program where it had one, 130 for a cancelled task, 124 for one that reached its time limit, otherwise 1.
"""


def page() -> str:
    rows = [
        [code(kind.code), str(kind.exit_code), str(kind.http_status), paragraphs(kind.about)]
        for kind in every()
        if kind.__module__ == "carma.errors"
    ]
    errors = table(["code", "exit code", "HTTP status", "meaning"], rows)
    outcomes = [_outcome(kind) for kind in typing.get_args(Outcome)]
    return "\n".join([MADE, INTRODUCTION, errors, OUTCOMES, table(["kind", "fields", "meaning"], outcomes)])


def _outcome(kind: type[msgspec.Struct]) -> list[str]:
    fields = ", ".join(code(field.encode_name) for field in msgspec.structs.fields(kind))
    return [code(str(kind.__struct_config__.tag)), fields, paragraphs(kind.__dict__.get("__doc__"))]

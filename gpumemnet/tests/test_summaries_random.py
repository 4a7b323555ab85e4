"""Whatever text comes, a reader gives a model or says what is wrong in a Usage error; nothing else gets out."""

from __future__ import annotations

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st
from keras_texts import EXPANDED_2, EXPANDED_3, FUNCTIONAL_2, FUNCTIONAL_3, TEXT_3
from test_summaries import COLUMNS, FLAT, MODULES, NESTED, PRINTED

from carma.errors import Usage
from gpumemnet.summaries import read_text

TEXTS = (FLAT, NESTED, COLUMNS, PRINTED, FUNCTIONAL_3, FUNCTIONAL_2, TEXT_3, EXPANDED_3, EXPANDED_2)
PIECES = (
    "",
    "0",
    "-1",
    "9" * 30,
    "None",
    "(",
    ")",
    "[",
    "]",
    ",",
    "…",
    "│",
    "|",
    "\n",
    "=" * 20,
    "x",
    "bias=False",
    "1e999",
)
SAMPLES = st.sampled_from([(), (3, 32, 32), (7,), (1, 1, 1, 1), (10**8, 10**8)])


def reads(text: str, sample: tuple[int, ...]) -> None:
    with contextlib.suppress(Usage):
        read_text(text, batch=2, sample=sample)


@given(st.text(), SAMPLES)
@settings(deadline=None)
def test_any_text(text: str, sample: tuple[int, ...]) -> None:
    reads(text, sample)
    reads(f"Net(\n  (0): Linear({text})\n)", sample)
    reads(f"Layer (type)   Output Shape   Param #\n{'=' * 30}\n{text}\n{'=' * 30}", sample)


@given(st.sampled_from(TEXTS), st.integers(0, 10_000), st.integers(0, 40), st.sampled_from(PIECES), SAMPLES)
@settings(deadline=None, max_examples=400)
def test_a_summary_with_a_piece_of_it_replaced(
    text: str, place: int, length: int, piece: str, sample: tuple[int, ...]
) -> None:
    place %= len(text)
    reads(text[:place] + piece + text[place + length :], sample)


@given(
    st.lists(st.sampled_from(sorted(MODULES)), min_size=1, max_size=6),
    st.integers(0, 60),
    st.sampled_from(PIECES),
    SAMPLES,
)
@settings(deadline=None, max_examples=400)
def test_modules_in_any_order(modules: list[str], place: int, piece: str, sample: tuple[int, ...]) -> None:
    changed = modules[0][:place] + piece + modules[0][place + 1 :]
    body = "\n".join(f"  ({number}): {module}" for number, module in enumerate([*modules, changed]))
    reads(f"Net(\n{body}\n)", sample)

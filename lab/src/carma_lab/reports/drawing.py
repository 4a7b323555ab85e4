"""Style and files of pictures: PNG, SVG, and SVG within a page. Equal runs give equal bytes.

matplotlib is imported only when drawing. Pictures are made without pyplot, which keeps references to all figures. The
colours are those of Okabe and Ito, which colour-blind readers can distinguish, on a light and on a dark background.
"""

from __future__ import annotations

import contextlib
import html
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from carma.errors import Refused
from gpumemnet.directories import make_folder
from gpumemnet.output_file import MARK, write_file

BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00"
DPI = 150  # of PNG files
KINDS = ("png", "svg")
PALETTE = (BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE)
INK, GRID, SHEET = "#1f2937", "#d4d8de", "#fefefe"
# In a page these three follow its colour scheme.
_FOLLOWING = {INK: "currentColor", GRID: "var(--grid)", SHEET: "var(--sheet)"}
_STYLE = {
    "figure.facecolor": SHEET,
    "axes.facecolor": SHEET,
    "savefig.facecolor": SHEET,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "font.size": 9,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "font.family": "DejaVu Sans",  # part of matplotlib, so equal everywhere
}


class Picture(NamedTuple):
    """`make` draws it; `about` is its caption."""

    name: str
    about: str
    make: Callable[[], Any]


def figure(width: float, height: float) -> Any:
    """An empty figure with this width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


@contextlib.contextmanager
def styled(name: str, **more: object) -> Iterator[None]:
    """The style, and a fixed salt for the ids in an SVG; Refused if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        hint = "Run pip install matplotlib, or omit --out and --html."
        raise Refused("matplotlib is not installed, so pictures cannot be drawn", hint) from error
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": f"carma-{name}", **more}):
        yield


def save(pictures: Sequence[Picture], out: Path, kinds: Sequence[str] = KINDS) -> list[Path]:
    """Writes each picture, as PNG and SVG, into the directory."""
    written = []
    for picture in pictures:
        with styled(picture.name):
            make_folder(out)
            drawn = picture.make()
            for path in (out / file for file in files_of([picture.name], kinds)):
                write_file(str(path), _bytes(drawn, path.suffix[1:]))
                written.append(path)
    return written


def files_of(names: Iterable[str], kinds: Sequence[str] = KINDS) -> list[str]:
    """The files of pictures with these names."""
    return [f"{name}.{kind}" for name in names for kind in kinds]


def _bytes(drawn: Any, kind: str) -> bytes:
    """The picture without date and version, so that equal pictures have equal bytes."""
    svg = {"Creator": MARK, **dict.fromkeys(("Date", "Format", "Type"))}
    target = io.BytesIO()
    drawn.savefig(target, format=kind, dpi=DPI, metadata={"Software": MARK} if kind == "png" else svg)
    return target.getvalue()


def inline(picture: Picture) -> str:
    """The picture as an element of a page: text stays text, and three colours are those of the page."""
    with styled(picture.name, **{"svg.fonttype": "none"}):
        text = _bytes(picture.make(), "svg").decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # ids that occur in every picture
    for colour, instead in _FOLLOWING.items():
        text = text.replace(colour, instead)
    about = html.escape(picture.about)
    text = re.sub(r'(<svg\b[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg\b[^>]*?) height="[^"]*"', r"\1", text, count=1)
    return text.replace("<svg", f'<svg role="img" aria-label="{about}"', 1).strip()


def span_unit(seconds: float) -> tuple[float, str]:
    """Unit of a time axis of this length: seconds per unit, and its name."""
    if seconds >= 3 * 86400:
        return 86400.0, "days"
    if seconds >= 2 * 3600:
        return 3600.0, "hours"
    return (60.0, "minutes") if seconds >= 120 else (1.0, "seconds")


def legend_above(axes: Any, columns: int) -> None:
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.99), ncols=columns, borderaxespad=0.0)

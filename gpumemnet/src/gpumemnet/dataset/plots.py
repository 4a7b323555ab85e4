"""Plots of a data set: coverage of its features, maps, memory against size, activity against size.

On a map each run is a point, and runs with similar features are near each other. If the memory classes are separate on
the map, they can be learned. A class has the same colour in all plots. matplotlib and scikit-learn are imported when
drawing.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from carma.errors import Refused
from gpumemnet.dataset.describe import coloured, sizes
from gpumemnet.dataset.schema import ACTIVITY
from gpumemnet.dataset.table import Numbers, Table
from gpumemnet.directories import make_folder, write_whole
from gpumemnet.output_file import MARK
from gpumemnet.serving.features import features

COLOURS = {"mlp": "#0b6e4f", "cnn": "#1d4ed8", "transformer": "#b45309"}
LABELS = {
    "layers": "layers",
    "batch": "batch size (samples)",
    "parameters": "parameters",
    "activations": "activations (elements a sample)",
    "activations_batch": "activations × batch (elements)",
    "footprint_mib": "footprint (MiB)",
}
STEP_MIB = 2  # torch requests multiples of it from the driver
ZOOM_MIB = 20 * STEP_MIB  # range of the staircase plot; more steps could not be distinguished
MIN_ZOOM_RUNS = 20  # in that range
MIN_BATCHES = 6  # of one model, for a line
MAX_LINES = 6
MIN_CORRELATED = 30  # runs, for a correlation
MAX_POINTS = 2000  # of a map: t-SNE takes a minute for more
MIN_POINTS = 5  # of a map
PERPLEXITY = 30.0
_GREY = "#9aa0a6"


def draw(tables: Sequence[Table], out: Path, seed: int) -> Iterator[Path]:
    """Writes each plot as PNG and SVG and yields their paths. Plots without data are left out."""
    pyplot = _pyplot()
    make_folder(out)
    for table in tables:
        yield from save(pyplot, _coverage(pyplot, table), out / f"{table.family}-coverage")
        yield from save(pyplot, _maps(pyplot, table, seed), out / f"{table.family}-map")
    for name, plot in (("staircase", _staircase), ("activity", _activity)):
        if (figure := plot(pyplot, tables)) is not None:
            yield from save(pyplot, figure, out / name)


def files_of(tables: Sequence[Table]) -> list[str]:
    """All files that `draw` may write."""
    names = [f"{table.family}-{what}" for table in tables for what in ("coverage", "map")]
    return [f"{name}{suffix}" for name in (*names, "staircase", "activity") for suffix in (".png", ".svg")]


def _pyplot() -> Any:
    try:
        import matplotlib
        import sklearn  # noqa: F401  # needed for the maps; a missing package is reported before anything is drawn
    except ImportError as error:
        hint = "pip install matplotlib scikit-learn"
        raise Refused(f"{error.name} is not installed, so no picture can be drawn", hint) from error
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 9, "axes.titlesize": 10})
    from matplotlib import pyplot

    return pyplot


def save(pyplot: Any, figure: Any, path: Path, dpi: int = 150) -> Iterator[Path]:
    """Writes PNG and SVG. Without a date and random identifiers, equal figures give equal files."""
    for kind, metadata in (("png", {"Software": MARK}), ("svg", {"Creator": MARK, "Date": None})):
        drawn, file = io.BytesIO(), path.with_name(f"{path.name}.{kind}")
        with pyplot.rc_context({"svg.hashsalt": "carma"}):
            figure.savefig(drawn, format=kind, dpi=dpi, metadata=metadata)
        write_whole(file, drawn.getvalue())
        yield file
    pyplot.close(figure)


def _class_colours(pyplot: Any, count: int) -> list[Any]:
    """Colours from dark (little memory) to light (much); a class has the same colour in all plots."""
    return [pyplot.get_cmap("viridis")(place) for place in np.linspace(0.0, 0.95, max(count, 2))][:count]


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e5e7eb", linewidth=0.7)
    axes.set_axisbelow(True)


def _caption(table: Table) -> str:
    gpus = sorted({str(head["gpu"]) for head in table.heads if head.get("gpu")})
    return f"{table.family}: {len(table):,} training runs" + (f" on {', '.join(gpus)}" if gpus else "")


def _coverage(pyplot: Any, table: Table) -> Any:
    """Histograms of the sizes; of the footprint also by class and with a linear axis."""
    figure, panels = pyplot.subplots(2, 3, figsize=(11, 5.6), layout="constrained")
    found = sizes(table)
    for axes, name in zip(panels.flat, ("layers", "batch", "parameters", "activations"), strict=False):
        axes.hist(found[name], bins=_log_bins(found[name]), color=COLOURS[table.family])
        axes.set_xscale("log")
        axes.set_xlabel(LABELS[name])
    fits = table["footprint_mib"][table["oom"] == 0]
    _by_class(pyplot, panels.flat[4], table, fits, _log_bins(fits))
    panels.flat[4].set_xscale("log")
    _by_class(pyplot, panels.flat[5], table, fits, np.linspace(0, fits.max(initial=1.0), 49))
    panels.flat[5].xaxis.set_major_formatter("{x:,.0f}")
    panels.flat[5].locator_params(axis="x", nbins=5)
    panels.flat[5].legend(frameon=False, fontsize=7, title="memory class", title_fontsize=7)
    for axes in panels.flat:
        axes.set_ylabel("runs")
        _plain(axes)
    figure.suptitle(f"Coverage of the data. {_caption(table)}", fontsize=11)
    return figure


def _by_class(pyplot: Any, axes: Any, table: Table, footprints: Numbers, bins: Numbers) -> None:
    found, labels = coloured(table.family, footprints)
    parts = [footprints[found == each] for each in range(len(labels))]
    axes.hist(parts, bins=bins, stacked=True, color=_class_colours(pyplot, len(labels)), label=labels)
    axes.set_xlabel(LABELS["footprint_mib"])


def _log_bins(values: Numbers, count: int = 40) -> Numbers:
    least, most = max(float(values.min(initial=np.inf)), 1e-9), float(values.max(initial=1.0))
    if not np.isfinite(least) or most <= least:
        return np.linspace(0.5, 1.5, 3) * max(most, 1e-9)
    bins: Numbers = np.geomspace(least, most * 1.0001, count)
    return bins


def _maps(pyplot: Any, table: Table, seed: int) -> Any:
    rows = _map_rows(table, seed)
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    if len(rows) < MIN_POINTS:
        figure.suptitle(f"{_caption(table)}: too few runs for a map")
        return figure
    scaled = _scaled_features(table, rows)
    found, labels = coloured(table.family, table["footprint_mib"][rows])
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    pca, perplexity = PCA(n_components=2, random_state=seed), min(PERPLEXITY, (len(scaled) - 1) / 3)
    tsne = TSNE(n_components=2, perplexity=perplexity, init="pca", random_state=seed)
    for axes, reduced in zip(panels, (pca, tsne), strict=True):
        _scatter(pyplot, axes, reduced.fit_transform(scaled), found, labels)
    shares = pca.explained_variance_ratio_
    panels[0].set_xlabel(f"first component ({100 * shares[0]:.0f} % of the variance)")
    panels[0].set_ylabel(f"second component ({100 * shares[1]:.0f} %)")
    panels[0].set_title("PCA", loc="left")
    panels[1].set_title("t-SNE (axes have no unit)", loc="left")
    panels[1].set_xticks([])
    panels[1].set_yticks([])
    handles, texts = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, texts, loc="outside right center", frameon=False, fontsize=8, markerscale=2.0, title="footprint"
    )
    figure.suptitle(f"Runs by their features, coloured by memory class. {_caption(table)}", fontsize=11)
    return figure


def _map_rows(table: Table, seed: int) -> NDArray[np.int64]:
    fits = np.flatnonzero(table["oom"] == 0)
    if len(fits) <= MAX_POINTS:
        return fits
    return np.sort(np.random.default_rng(seed).choice(fits, MAX_POINTS, replace=False))


def _scaled_features(table: Table, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Each feature with mean 0 and deviation 1; constant ones are left out."""
    scalars = np.stack([features(table.described(int(row))).scalars for row in rows]).astype(np.float64)
    varying = scalars[:, scalars.std(axis=0) > 1e-6]
    scaled: NDArray[np.float64] = (varying - varying.mean(axis=0)) / varying.std(axis=0)
    return scaled


def _scatter(pyplot: Any, axes: Any, points: Any, found: NDArray[np.int64], labels: Sequence[str]) -> None:
    """Draws points as an image, because an SVG would have megabytes of them."""
    for each, (label, colour) in enumerate(zip(labels, _class_colours(pyplot, len(labels)), strict=True)):
        own = points[found == each]
        legend = f"{label} ({len(own):,})"
        axes.scatter(own[:, 0], own[:, 1], s=10, color=colour, label=legend, linewidths=0, rasterized=True)
    _plain(axes)


def _staircase(pyplot: Any, tables: Sequence[Table]) -> Any | None:
    """Requested memory can have any size; the allocator reserves memory from the driver in pieces of 2 MiB."""
    zooms = [(table, zoom) for table in tables if (zoom := densest(_fitting(table, "reserved_mib"))) is not None]
    models = [line for table in tables for line in _same_model(table)][:MAX_LINES]
    count = len(zooms) + bool(models)
    if not count:
        return None
    figure, panels = pyplot.subplots(1, count, figsize=(1 + 4.4 * count, 4.4), layout="constrained", squeeze=False)
    for axes, (table, least_mib) in zip(panels.flat, zooms, strict=False):
        _in_order(pyplot, axes, table, least_mib)
    if models:
        _footprint_over_batch(pyplot, panels[0, -1], models)
    for axes in panels.flat:
        _plain(axes)
    figure.suptitle("Requested memory has any size, reserved memory grows in steps", fontsize=11)
    return figure


def _fitting(table: Table, name: str) -> Numbers:
    found: Numbers = table[name][table["oom"] == 0]
    return found


def densest(values_mib: Numbers) -> float | None:
    """The start of the range of ZOOM_MIB with most runs; None if no range has enough runs to show steps."""
    ordered = np.sort(values_mib)
    until = np.searchsorted(ordered, ordered + ZOOM_MIB)
    counts = until - np.arange(len(ordered))
    if not len(counts) or counts.max() < MIN_ZOOM_RUNS:
        return None
    return float(ordered[counts.argmax()])


def _in_order(pyplot: Any, axes: Any, table: Table, least_mib: float) -> None:
    """Plots requested and reserved memory, each sorted separately, so that both rise; runs with equal values form a
    step."""
    most_mib = least_mib + ZOOM_MIB
    for name, style in (
        ("requested_mib", {"color": _GREY, "linewidth": 0.8, "markersize": 2.5}),
        ("reserved_mib", {"color": COLOURS[table.family], "linewidth": 0.8, "markersize": 4.5}),
    ):
        values = _fitting(table, name)
        shown = np.sort(values[(values >= least_mib) & (values <= most_mib)])
        axes.plot(np.arange(1, len(shown) + 1), shown, "o-", label=f"{name.removesuffix('_mib')} at the peak", **style)
    axes.set_ylim(least_mib - 1, most_mib + 1)
    axes.yaxis.set_major_locator(pyplot.MultipleLocator(STEP_MIB * 5))
    axes.yaxis.set_minor_locator(pyplot.MultipleLocator(STEP_MIB))
    axes.grid(which="minor", axis="y", color="#e5e7eb", linewidth=0.5)
    axes.set_xlabel("runs, requested and reserved sorted separately")
    axes.set_ylabel("memory (MiB)")
    axes.set_title(f"{table.family}: reserved in pieces of {STEP_MIB} MiB", loc="left")
    axes.legend(frameon=False, fontsize=8)


Line = tuple[str, list[int], list[float]]


def _same_model(table: Table) -> list[Line]:
    """Runs that differ only in the batch, if there are enough of them."""
    groups: dict[str, list[int]] = {}
    for row, config in enumerate(table.configs):
        if not table["oom"][row]:
            but_batch = (config.input, config.optimizer, config.precision, config.checkpointing, config.channels_last)
            groups.setdefault(json.dumps((but_batch, config.model), sort_keys=True), []).append(row)
    found: list[Line] = []
    for rows in groups.values():
        ordered = sorted(rows, key=lambda row: table.configs[row].batch)
        if len(ordered) >= MIN_BATCHES:
            first = table.configs[ordered[0]]
            batches = [table.configs[row].batch for row in ordered]
            name = f"{table.family}, {first.shape}, {first.optimizer}, {first.precision}"
            found.append((name, batches, table["footprint_mib"][ordered].tolist()))
    return sorted(found, key=lambda line: -len(line[1]))


def _footprint_over_batch(pyplot: Any, axes: Any, lines: Sequence[Line]) -> None:
    for (name, batches, footprints), colour in zip(lines, _class_colours(pyplot, len(lines)), strict=True):
        axes.step(batches, footprints, where="post", color=colour, linewidth=1.2)
        axes.plot(batches, footprints, "o", color=colour, markersize=2.5, label=name)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(LABELS["batch"])
    axes.set_ylabel(LABELS["footprint_mib"])
    axes.set_title("One model, a growing batch", loc="left")
    axes.legend(frameon=False, fontsize=8)


def _activity(pyplot: Any, tables: Sequence[Table]) -> Any | None:
    """Rank correlation, because activity saturates."""
    active = [table for table in tables if np.isfinite(table["step_ms"]).sum() >= MIN_CORRELATED]
    if not active:
        return None
    size = (1.6 + 3.8 * len(active), 4.6)
    figure, panels = pyplot.subplots(1, len(active), figsize=size, layout="constrained", squeeze=False)
    images = list(map(_heat, panels.flat, active))
    figure.colorbar(images[-1], ax=panels, label="rank correlation (Spearman)", shrink=0.85)
    figure.suptitle("Activity of the GPU against the size of the run", fontsize=11)
    return figure


def _heat(axes: Any, table: Table) -> Any:
    rows = np.isfinite(table["step_ms"])
    across = sizes(table)
    down = [column.name for column in ACTIVITY]
    grid = np.array([[rank_correlation(table[name][rows], size[rows]) for size in across.values()] for name in down])
    image = axes.imshow(grid, cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
    for (y, x), value in np.ndenumerate(grid):
        word = "–" if np.isnan(value) else f"{value:+.2f}"
        axes.text(x, y, word, ha="center", va="center", fontsize=7.5, color="white" if abs(value) > 0.6 else "black")
    names = [name.removesuffix("_mib").replace("activations_batch", "activations × batch") for name in across]
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
    axes.set_yticks(range(len(down)), [name.replace("_", " ") for name in down])
    axes.set_title(f"{table.family}, {int(rows.sum()):,} runs", loc="left")
    return image


def rank_correlation(left: Numbers, right: Numbers) -> float:
    """Spearman's rank correlation; NaN if too few runs have both values or one of them is constant."""
    known = np.isfinite(left) & np.isfinite(right)
    if known.sum() < MIN_CORRELATED or np.ptp(left[known]) == 0 or np.ptp(right[known]) == 0:
        return float("nan")
    from scipy.stats import spearmanr  # type: ignore[import-untyped]  # scikit-learn brings it

    return float(spearmanr(left[known], right[known]).statistic)

"""Maps of a data set: each run is a point near runs with similar features, coloured by memory class.

Classes that are separate on such a map can be learned. The features are those of the learned estimators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpumemnet.dataset.describe import coloured
from gpumemnet.dataset.plots import class_colours, plain, said
from gpumemnet.dataset.table import Table
from gpumemnet.serving.features import features

MOST_POINTS = 2000  # t-SNE takes a minute for more
LEAST_POINTS = 5
PERPLEXITY = 30.0


def maps(pyplot: Any, table: Table, seed: int) -> Any:
    rows = _chosen(table, seed)
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 5.2), layout="constrained")
    if len(rows) < LEAST_POINTS:
        figure.suptitle(f"{said(table)}: too few for a map")
        return figure
    scaled = _scaled(table, rows)
    found, labels = coloured(table.family, table["footprint_mib"][rows])
    points, shares = _pca(scaled, seed)
    _scatter(pyplot, panels[0], points, found, labels)
    panels[0].set_xlabel(f"first component ({100 * shares[0]:.0f} % of the variance)")
    panels[0].set_ylabel(f"second component ({100 * shares[1]:.0f} %)")
    panels[0].set_title("PCA", loc="left")
    _scatter(pyplot, panels[1], _tsne(scaled, seed), found, labels)
    panels[1].set_title("t-SNE (axes have no unit)", loc="left")
    panels[1].set_xticks([])
    panels[1].set_yticks([])
    handles, told = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, told, loc="outside right center", frameon=False, fontsize=8, markerscale=2.0, title="footprint"
    )
    figure.suptitle(f"Runs by their features, coloured by memory class. {said(table)}", fontsize=11)
    return figure


def _chosen(table: Table, seed: int) -> NDArray[np.int64]:
    fits = np.flatnonzero(table["oom"] == 0)
    if len(fits) <= MOST_POINTS:
        return fits
    return np.sort(np.random.default_rng(seed).choice(fits, MOST_POINTS, replace=False))


def _scaled(table: Table, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    """Each feature with mean 0 and deviation 1; constant ones are left out."""
    told = np.stack([features(table.described(int(row))).scalars for row in rows]).astype(np.float64)
    varying = told[:, told.std(axis=0) > 1e-6]
    scaled: NDArray[np.float64] = (varying - varying.mean(axis=0)) / varying.std(axis=0)
    return scaled


def _pca(scaled: NDArray[np.float64], seed: int) -> tuple[Any, Any]:
    from sklearn.decomposition import PCA

    fitted = PCA(n_components=2, random_state=seed)
    return fitted.fit_transform(scaled), fitted.explained_variance_ratio_


def _tsne(scaled: NDArray[np.float64], seed: int) -> Any:
    from sklearn.manifold import TSNE

    perplexity = min(PERPLEXITY, (len(scaled) - 1) / 3)
    return TSNE(n_components=2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(scaled)


def _scatter(pyplot: Any, axes: Any, points: Any, found: NDArray[np.int64], labels: Sequence[str]) -> None:
    """Draws points as an image, because an SVG would have megabytes of them."""
    for each, (label, colour) in enumerate(zip(labels, class_colours(pyplot, len(labels)), strict=True)):
        own = points[found == each]
        told = f"{label} ({len(own):,})"
        axes.scatter(own[:, 0], own[:, 1], s=10, color=colour, label=told, linewidths=0, rasterized=True)
    plain(axes)

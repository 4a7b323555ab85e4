"""A comparison as one HTML page."""

from __future__ import annotations

from pathlib import Path

from carma_lab.reports.compare import Comparison
from carma_lab.reports.compare_pictures import pictures
from carma_lab.reports.compare_tables import changes, overall, side_by_side
from carma_lab.reports.html_page import page, picture_section, section, write_text


def write(found: Comparison, path: Path | str) -> Path:
    tables = [section(trace, side_by_side(found, trace)) for trace in found.traces]
    if len(found.traces) > 1:
        note = "Ratios are geometric means over the traces; counts are sums."
        tables.append(section("Over all traces", overall(found), note))
    tables.append(section("Tasks whose completion differs most", changes(found)))
    drawn = [picture_section(picture) for picture in pictures(found)]
    lead = f"{found.variants[0]} is 1. Below 1 is less: shorter, or with less energy."
    return write_text(
        page(" and ".join([", ".join(found.variants[:-1]), found.variants[-1]]), [lead], [*tables, *drawn]), path
    )

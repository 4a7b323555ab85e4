"""Makes the scores that bounds rest on (src/carma/trial/data/trace-scores.json) from a comparison with measurements:

    python -m lab.tools.fit_bounds lab/results/h200/memory/estimators.json

The comparison must have been made with --folds: errors on what was learnt from would make bounds too tight.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from carma.trial.replay.bound import SCORES
from carma_lab.bench.memory import comparison_file as written
from carma_lab.bench.memory.figures import scores_of


def main(arguments: list[str]) -> int:
    path = Path(arguments[0])
    comparison = written.read(path)
    if comparison.caution:
        print(f"{path} cannot be used: {comparison.caution}", file=sys.stderr)
        return 1
    scores = scores_of((row for row in comparison.rows if row.estimator == "trace"), comparison.source)
    lines = ",\n".join(msgspec.json.encode(case).decode() for case in scores.cases)
    head = msgspec.json.encode({"format": scores.format, "source": scores.source}).decode()
    SCORES.write_text(f'{head[:-1]},"cases":[\n{lines}\n]}}\n', encoding="utf-8")
    for group in sorted({case.group for case in scores.cases}):
        found = [case.score for case in scores.cases if case.group == group]
        print(f"{group:12} {len(found):4} cases, the largest {max(found):+.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Reports of a run, simulated or real: figures, fairness, comparisons, pictures, one HTML page.

It reads what `carma simulate --out` and `carma run-report --save` have written, and decides nothing.
"""

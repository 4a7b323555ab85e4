"""Reports of a run, simulated or real: figures, fairness, comparisons, pictures, one HTML page.

They read the files of `carma simulate --out` and `carma run-report --save`.
"""

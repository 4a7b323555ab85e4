"""The verbs of the lab: bench, compare, run-report, simulate and trace."""

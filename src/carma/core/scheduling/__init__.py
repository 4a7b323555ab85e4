"""The scheduling pass: queue order, verdicts of GPUs, placement, reservation, fairness, quotas and forecasts."""

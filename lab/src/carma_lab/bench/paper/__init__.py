"""The published experiments, simulated: their tables with ours beside them, and goodput on the same traces."""

"""Placement policies under the paper's names, one file each. They rank GPUs that passed every filter, and no more."""

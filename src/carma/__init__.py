"""CARMA lets deep-learning tasks share the GPUs of a server safely."""

__version__ = "0.3.0"

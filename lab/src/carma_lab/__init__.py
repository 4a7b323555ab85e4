"""The laboratory of CARMA: simulator, traces, reports, benchmarks and published experiments."""

__version__ = "0.3.0"

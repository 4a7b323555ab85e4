"""GPUMemNet: the data set, training, learned and published memory estimators, model summaries."""

__version__ = "0.2.0"

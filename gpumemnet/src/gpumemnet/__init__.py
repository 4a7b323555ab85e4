"""GPUMemNet: the data set, training, learned and published memory estimators, model summaries."""

from typing import Literal, get_args

Family = Literal["mlp", "cnn", "transformer"]  # of networks
FAMILIES: tuple[Family, ...] = get_args(Family)
__version__ = "0.3.0"

"""The verbs `carma dataset` and `carma train`."""

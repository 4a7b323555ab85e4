"""Learns the estimators from the data set and evaluates them on unseen rows."""

"""The data set for learned estimators: random training runs and their measurements on a GPU."""

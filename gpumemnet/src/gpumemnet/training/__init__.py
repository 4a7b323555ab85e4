"""Learning the estimators from the data set, and judging them on what they have not seen."""

"""How much memory a task will take: estimators, each behind core.ports.Estimator, and who is asked in which order."""

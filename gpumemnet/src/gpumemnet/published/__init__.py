"""Estimators that others have published, each as its paper or its library has it, so that one table can compare them.

They are kept as published, with their faults: what a method leaves out is said in the answer's warnings, never mended.
None of them states a bound, so the bound is the figure itself.
"""

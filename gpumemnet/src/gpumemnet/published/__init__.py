"""Estimators that others have published, each as in its paper or library, so that one table can compare them.

They are unchanged, including their errors: what a method leaves out is a warning of the answer, never corrected. None
of them has a bound, so the bound is the estimate itself.
"""

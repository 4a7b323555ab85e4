"""Starting attempts, ending them, and telling how they ended.

Kept empty on purpose: the runner imports from this package and must start within milliseconds.
"""

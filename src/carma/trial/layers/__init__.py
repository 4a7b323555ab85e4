"""The layers of a model, and arithmetic over them: what each keeps, shares and computes again."""

"""The layers of a model, and arithmetic over them: memory that each keeps, shares and recomputes."""

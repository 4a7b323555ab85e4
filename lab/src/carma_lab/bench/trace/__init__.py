"""`carma bench trace`: training scripts that arrive as in a published trace, under several policies."""

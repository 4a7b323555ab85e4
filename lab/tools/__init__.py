"""Programs that fit models and write the tables of the documentation. Run from the checkout: `python -m
lab.tools.NAME`."""

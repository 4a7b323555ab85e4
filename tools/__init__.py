"""Tools of the project's developers; no distribution contains them."""

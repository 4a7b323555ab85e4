"""Training scripts that need torch and no carma. They are run as files, by the interpreter that has torch."""

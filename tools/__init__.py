"""What is needed to look after the project, and not to use it."""

"""`carma bench crash`: kills daemon, runners and tasks, copies the database, and counts what was lost or run twice."""

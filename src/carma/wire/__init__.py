"""What travels between client and daemon: versioned types and the table of routes. No I/O here."""

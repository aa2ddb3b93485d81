"""Moving a request from one process to another: the receiver pulls (no torch)."""

"""Requests and the units they hold: integers only, no byte of cache (no torch)."""

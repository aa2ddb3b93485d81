"""Transports that read plain ranges of bytes: staging, and the moves applied locally."""

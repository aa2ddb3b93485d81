"""``kvcore plugins``, ``explain``, ``check`` and ``layout``."""

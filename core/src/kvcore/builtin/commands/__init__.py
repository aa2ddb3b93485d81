"""``kvcore plugins``, ``explain``, ``check``, ``keys`` and ``layout``."""

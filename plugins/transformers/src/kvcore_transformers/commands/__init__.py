"""``kvcore run``, ``kvcore plan`` and ``kvcore accuracy``."""

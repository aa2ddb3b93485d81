"""The suite for formats."""

from __future__ import annotations

from kvcore.testing.formats.suite import FormatSuite

__all__ = ["FormatSuite"]

"""Engines whose ranks are processes of their own."""

from __future__ import annotations

from kvcore.testing.ranks.rig import Answer, RankEngine, RankPair, RankPool, RankProcess

__all__ = ["Answer", "RankEngine", "RankPair", "RankPool", "RankProcess"]

"""Programs of strided moves between two placed layouts: found (matching), merged (programs), carried out (applying)."""

from __future__ import annotations

from kvcore.layout.moves.programs import Bytes, Descriptors, Move, Program, Selection, run_program

__all__ = ["Bytes", "Descriptors", "Move", "Program", "Selection", "run_program"]

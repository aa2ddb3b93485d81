"""The suite for formats."""

from __future__ import annotations

from kvcore.testing.formats.attention import FormatAttention
from kvcore.testing.formats.codec import FormatCodec
from kvcore.testing.formats.layout import FormatLayout
from kvcore.testing.formats.moves import FormatMoves
from kvcore.testing.formats.values import FormatBytes


class FormatSuite(FormatLayout, FormatBytes, FormatCodec, FormatAttention, FormatMoves):
    """What a format promises: its layout, its values in real memory and their precision, attention
    over them, and that every component moves.

    Override the fixture ``kv_format``; where the plugin brings kernels of its own, also ``registry``. The attributes
    ``groups``, ``page_size`` and ``attention_error`` say what it is tried with.
    """

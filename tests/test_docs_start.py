"""``docs/README.md``: its table of dtypes is the one of the sources."""

import re
from pathlib import Path

import torch

from kvcore.layout.dtypes import DTYPES

PAGE = (Path(__file__).parents[1] / "docs" / "README.md").read_text()


def test_the_table_of_dtypes_is_complete_and_right() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| `torch\.(\w+)` \|$", PAGE, re.MULTILINE)
    assert rows == [(item.name, str(item.itemsize), item.torch_name) for item in DTYPES.values()]
    for _, itemsize, name in rows:
        assert getattr(torch, name).itemsize == int(itemsize)

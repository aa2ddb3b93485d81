"""The transport of ``docs/transports.md`` between two processes, one of which is killed."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcore.builtin.pools.memfd import MemfdPool
from kvcore.contract import ReadJob
from kvcore.errors import TransferError
from kvcore.layout import Axis, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.layout.moves import Program

PAGE = (Path(__file__).parents[1] / "docs" / "transports.md").read_text()
EXAMPLE = next(
    block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "class PreadTransport" in block
)

CHILD = """
import sys
import numpy as np
from kvcore.builtin.pools.memfd import MemfdPool

arena = MemfdPool().allocate(int(sys.argv[1]), "cpu")
arena.array()[:] = np.arange(arena.nbytes) % 251
transport = PreadTransport()
print(transport.register({"full": arena}).hex(), flush=True)
sys.stdin.read()
"""


def layout(order: str) -> Layout:
    axes = (Axis("slot", 4), Axis("head", 2), Axis("dim", 8))
    regions = tuple(region(name, "full/kv", [Field("x", "bf16", order, axes)], ranges=("pages",)) for name in "kv")
    return Layout(
        "bf16", 1, "full", (0, 1), regions, (SpaceSpec("full", "sequence", "page", 4),), (UnitRange("pages", "full"),)
    )


def finish(handle: Any) -> None:
    end = time.monotonic() + 20
    while not handle.poll():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_between_processes() -> None:
    namespace: dict[str, Any] = {"__name__": "__docs__"}
    exec(compile(EXAMPLE, "docs/transports.md", "exec", dont_inherit=True), namespace)
    src, dst = layout("slot head dim"), layout("head slot dim")
    place = src.place({"pages": 5})
    program = Program.build(src, place, dst, place)
    target = MemfdPool().allocate(place.arena_bytes, "cpu")
    target.array()[:] = 0xFF
    command = [sys.executable, "-c", EXAMPLE + CHILD, str(place.arena_bytes)]
    transport = namespace["PreadTransport"]()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            record = bytes.fromhex(child.stdout.readline())
            transport.register({"full": target})
            connection = transport.connect(record)
            assert connection.alive()
            job = ReadJob("full", program, np.array([3]), np.array([1]))
            finish(connection.read([job]))
        finally:
            child.kill()
            child.wait()
        unit = src.envelope_bytes
        sent = (np.arange(3 * unit, 4 * unit) % 251).astype(np.uint8).reshape(2, 2, 4, 2, 16)  # layer, k/v, slot, head
        np.testing.assert_array_equal(target.array()[unit : 2 * unit], sent.swapaxes(2, 3).reshape(-1))
        assert transport.reader.stats.staged_bytes == unit
        assert not connection.alive()
        with pytest.raises(TransferError):
            connection.read([job])
        with pytest.raises(TransferError):
            transport.connect(record)
    transport.close()
    target.close()

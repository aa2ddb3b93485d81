"""The shm transport between two processes, 64 KiB pages in populated arenas, against memcpy of the same bytes.

Goals are set where one pull is 32 MiB. A single larger memcpy is itself faster on some machines (1.7 times at 128 MiB
where this was written, most likely for glibc's non-temporal stores above 48 MiB), which copies of 64 KiB cannot share, so
the larger pull is shown without a goal.
"""

from __future__ import annotations

import multiprocessing
import time
from functools import partial
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.timing import Figure, figure, speed_ratio
from kvcore.builtin.formats import PLAIN_FORMATS
from kvcore.builtin.pools.memfd import POOL_BUILDERS
from kvcore.contract import ReadJob
from kvcore.layout import Layout
from kvcore.layout.moves import Program
from kvcore.spec import LayerGroup, Shard, TensorSpec
from kvcore.transfer.shm.transport import ShmTransport

PAGE_BYTES, UNITS = 64 << 10, 2049


def _layout() -> Layout:
    heads = (TensorSpec("k", 2, 64), TensorSpec("v", 2, 64))
    group = LayerGroup(name="full", layers=(0, 1), tensors=heads, num_query_heads=2)
    fp32 = next(item for item in PLAIN_FORMATS if item.name == "fp32")
    layout = fp32().layout(group, page_size=32, shard=Shard(), arena="page_major")
    if layout.envelope_bytes != PAGE_BYTES:
        raise ValueError(f"the benchmark wants {PAGE_BYTES} B a page, the layout has {layout.envelope_bytes}")
    return layout


def _owner(pipe: Connection) -> None:
    """The prefill side: own a populated arena, serve it until told to stop."""
    arena = POOL_BUILDERS[0]().allocate(PAGE_BYTES * UNITS, "cpu")
    arena.array()[:] = 7
    transport = ShmTransport()
    pipe.send_bytes(transport.register({"full": arena}))
    pipe.recv_bytes()
    transport.close()
    arena.close()


def run() -> list[Figure]:
    """Pull 128 MiB: destination contiguous, and shuffled on both sides."""
    layout = _layout()
    placement = layout.place({layout.ranges[0].name: UNITS})
    program = Program.build(layout, placement, layout, placement)
    here, there = multiprocessing.get_context("spawn").Pipe()
    owner = multiprocessing.get_context("spawn").Process(target=_owner, args=(there,), daemon=True)
    owner.start()
    arena = POOL_BUILDERS[0]().allocate(PAGE_BYTES * UNITS, "cpu")
    transport = ShmTransport()
    transport.register({"full": arena})
    peer = transport.connect(here.recv_bytes())

    def pull(src: np.ndarray, dst: np.ndarray) -> None:
        handle = peer.read([ReadJob("full", program, src, dst)])
        while not handle.poll():
            time.sleep(50e-6)  # the copier thread needs the interpreter between copies

    figures: list[Figure] = []
    for mebibytes, gathered, scattered in ((32, 0.8, 0.6), (128, None, None)):
        pages = (mebibytes << 20) // PAGE_BYTES
        src_bytes, dst_bytes = np.ones(pages * PAGE_BYTES, np.uint8), np.zeros(pages * PAGE_BYTES, np.uint8)
        memcpy = partial(np.copyto, dst_bytes, src_bytes)
        rng = np.random.default_rng(0)
        straight = np.arange(1, pages + 1)
        shuffled, other = rng.permutation(straight), rng.permutation(straight)
        what = f"shm pull of {mebibytes} MiB, 64 KiB pages"
        for name, src, dst, goal in (
            ("both sides contiguous", straight, straight, None),
            ("destination contiguous", shuffled, straight, gathered),
            ("shuffled on both sides", shuffled, other, scattered),
        ):
            figures.append(figure(f"{what}, {name}", speed_ratio(partial(pull, src, dst), memcpy), at_least=goal))
    peer.close()
    transport.close()
    arena.close()
    here.send_bytes(b"done")
    owner.join(10)
    return figures

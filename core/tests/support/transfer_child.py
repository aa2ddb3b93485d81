"""A process at the other end, run as a script: ``python transfer_child.py ROLE JSON``. It obeys lines on its stdin.

``sender``: serves an arena whose every byte says which unit it belongs to; prints its address; then ``begin ID N``,
``offer ID START STOP FIRST UNITS LAST``, ``write UNIT BYTE``, ``quit``. ``attach``: maps the arenas of an endpoint
record, checks a byte, exits 0.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from kvcore.transfer.session.base import TransferOptions
from kvcore.transfer.shm.transport import ShmTransport
from kvcore.transfer.wire.endpoint import SenderEndpoint


def _kit() -> Any:
    spec = importlib.util.spec_from_file_location("transfer_kit", Path(__file__).with_name("transfer_kit.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def content(unit: int, nbytes: int) -> Any:
    """Bytes of a unit's envelope: all different from unit to unit."""
    import numpy as np

    return ((np.arange(nbytes) * 7 + unit * 13) % 251).astype(np.uint8)


def sender(config: dict[str, Any]) -> None:
    kit = _kit()
    layout = kit.layout(arena="page_major")
    units = config["units"]
    arena = kit.MemArena(layout.place({"pages": units}).arena_bytes)
    envelopes = arena.array().reshape(units, -1)
    for unit in range(units):
        envelopes[unit] = content(unit, envelopes.shape[1])
    transport = ShmTransport()
    record = transport.register({"full": arena})
    manifest = kit.manifest("sender", config["instance"], layout, units=units)
    manifest = msgspec.structs.replace(manifest, endpoint=record)
    options = TransferOptions(**config["options"])
    with SenderEndpoint(manifest, options=options) as endpoint:
        print(json.dumps({"address": endpoint.address, "endpoint": record.hex()}), flush=True)
        for line in sys.stdin:
            word, *args = line.split()
            if word == "begin":
                endpoint.begin(args[0], int(args[1]))
            elif word == "offer":
                ids = [int(unit) for unit in args[4].split(",")]
                endpoint.offer(args[0], int(args[1]), int(args[2]), [kit.payload(ids, int(args[3]))],
                               last=args[5] == "1", engine_data=b"e" if args[5] == "1" else b"")  # fmt: skip
            elif word == "event":
                print(json.dumps({"event": type(endpoint.wait_event(10)).__name__}), flush=True)
                continue
            elif word == "quit":
                break
            print("{}", flush=True)
    transport.close()


def attach(config: dict[str, Any]) -> None:
    kit = _kit()
    transport = ShmTransport()
    transport.register({"full": kit.MemArena(4096)})
    connection = transport.connect(bytes.fromhex(config["endpoint"]))
    first = connection.peek("full")
    assert first[0] == config["byte"], first[0]
    try:
        first[0] = 1
    except ValueError:
        pass
    else:
        raise AssertionError("the peer's memory is writable")
    print("attached", flush=True)
    if config.get("wait"):
        sys.stdin.readline()
    if config.get("tidy"):
        transport.close()


if __name__ == "__main__":
    {"sender": sender, "attach": attach}[sys.argv[1]](json.loads(sys.argv[2]))

"""An owner in another process whose arena is on the fake device: ``python stage_child.py NBYTES``.

Prints the endpoint record, then obeys lines on its stdin until it ends.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np

from kvcore.transfer.shm.transport import ShmTransport

spec = importlib.util.spec_from_file_location("fake_device", Path(__file__).with_name("fake_device.py"))
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)

arena = module.FakeArena(int(sys.argv[1]))
arena.array()[:] = np.arange(arena.nbytes) % 251
arena.fake.mark()
transport = ShmTransport()
print(transport.register({"full": arena}).hex(), flush=True)
sys.stdin.read()
transport.close()

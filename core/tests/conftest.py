"""Fixtures shared by core's tests."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from by_path import load


def _load(name: str) -> ModuleType:
    return load(Path(__file__).parent / "support" / f"{name}.py")


@pytest.fixture(scope="module")
def small_heap() -> Iterator[None]:
    """What is there already is not walked again by every collection: in a process that has imported torch, half a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def loop() -> ModuleType:
    """The slow oracle of the layout language: loops over indices, no code shared with kvcore."""
    return _load("layout_loop")


@pytest.fixture(scope="session")
def cases() -> ModuleType:
    """Layouts of real formats, and hypothesis strategies for made-up ones."""
    return _load("layout_cases")


@pytest.fixture(scope="session")
def rig() -> ModuleType:
    """A store without a manager, with slow oracles for bytes and attention (needs torch)."""
    return _load("rig")


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """What the transfer tests share: arenas, manifests, a wire and a memory that do what a test tells them to."""
    return _load("transfer_kit")


@pytest.fixture(scope="session")
def hostile() -> ModuleType:
    """What a peer may send that means no good."""
    return _load("hostile")


@pytest.fixture(scope="session")
def ranks() -> ModuleType:
    """Senders and receivers of several ranks, in one thread."""
    return _load("rank_kit")


@pytest.fixture(scope="session")
def shelf() -> ModuleType:
    """Blocks, backends, a copier that copies when told to, and a small cache, for retraction (needs torch)."""
    return _load("backup_kit")


@pytest.fixture(scope="session")
def device() -> ModuleType:
    """A device without a device: memory kvcore cannot address, copies that end late."""
    return _load("fake_device")


@pytest.fixture(scope="session")
def flat() -> ModuleType:
    """A transport of flat reads whose wire does what a test tells it to."""
    return _load("flat_kit")


@pytest.fixture(scope="session")
def chain() -> ModuleType:
    """A hybrid model whose state depends on every token and their order, in poisoned caches (needs torch)."""
    return _load("state_kit")


@pytest.fixture(scope="session")
def chaos() -> SimpleNamespace:
    """The simulated engines and what is done to them, and protocols with a rule taken out (needs torch)."""
    support = str(Path(__file__).parent / "support")
    if support not in sys.path:
        sys.path.insert(0, support)
    rounds, mutants = importlib.import_module("chaos.rounds"), importlib.import_module("chaos.mutants")
    return SimpleNamespace(**vars(rounds), MUTANTS=mutants.MUTANTS)

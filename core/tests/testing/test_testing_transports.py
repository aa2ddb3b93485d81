"""The suite for transports, tried with mutants of shm."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvcore.contract import PeerConnection, ReadHandle, ReadJob, Support, unsupported
from kvcore.testing import Case, TransportSuite, run, transports
from kvcore.transfer.copier import Copier, CopyTask, InlineCopier
from kvcore.transfer.shm.transport import ShmConnection, ShmTransport


def red(name: str, make: Callable[[], ShmTransport]) -> bool:
    """Whether a check fails in every way it is run."""
    checks = run([Case("transports", "mutant", TransportSuite, {"new_transport": lambda: make})], select=name)
    assert {check.check.partition("[")[0] for check in checks} == {name}
    return all(check.outcome == "failed" for check in checks)


class Slow(Copier):
    """Every copy starts late, on a thread of its own."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def submit(self, task: CopyTask) -> None:
        self.threads.append(threading.Thread(target=self._run, args=(task,)))
        self.threads[-1].start()

    def _run(self, task: CopyTask) -> None:
        time.sleep(0.03)
        task.run()

    def close(self) -> None:
        for thread in self.threads:
            thread.join()


class Wrapped(PeerConnection):
    """A connection that a mutant changes in one point."""

    def __init__(self, inner: ShmConnection) -> None:
        self.inner = inner

    def read(self, jobs: Sequence[ReadJob]) -> ReadHandle:
        return self.inner.read(jobs)

    def alive(self) -> bool:
        return self.inner.alive()

    def quiesce(self, timeout_s: float) -> bool:
        return self.inner.quiesce(timeout_s)

    def close(self) -> None:
        self.inner.close()


def mutant(connection: type[Wrapped], copier: Callable[[], Copier] = InlineCopier) -> Callable[[], ShmTransport]:
    class Mutant(ShmTransport):
        def __init__(self) -> None:
            super().__init__(copier())

        def connect(self, endpoint: bytes) -> Any:
            return connection(super().connect(endpoint))

    return Mutant


class Liar(ReadHandle):
    def poll(self) -> bool:
        return True


@pytest.mark.parametrize("copier", [InlineCopier, Slow])
def test_shm_passes_with_any_copier(copier: Callable[[], Copier]) -> None:
    checks = run([Case("transports", "shm", TransportSuite, {"new_transport": lambda: lambda: ShmTransport(copier())})])
    assert {check.outcome for check in checks} == {"passed"}
    assert len(checks) == 18


def test_success_that_is_reported_early() -> None:
    class Early(Wrapped):
        def read(self, jobs: Sequence[ReadJob]) -> ReadHandle:
            super().read(jobs)
            return Liar()

    assert red("test_success_means_landed", mutant(Early, Slow))
    assert red("test_reads_are_exact", mutant(Early, Slow))


def test_bytes_that_move_again_after_success() -> None:
    """A duplicate of a read lands when the owner has reused its memory."""

    class Twice(Wrapped):
        def read(self, jobs: Sequence[ReadJob]) -> ReadHandle:
            handle = super().read(jobs)
            handle.poll()
            for delay in (0.02,):
                again = threading.Timer(delay, super().read, [jobs])
                again.start()
            return handle

    assert red("test_success_means_landed", mutant(Twice))


def test_a_region_that_is_not_read() -> None:
    class Lacking(Wrapped):
        def read(self, jobs: Sequence[ReadJob]) -> ReadHandle:
            return super().read([self.cut(job) for job in jobs])

        def cut(self, job: ReadJob) -> ReadJob:
            move = job.program.moves[-1]
            shorter = replace(move, run_bytes=move.run_bytes - 16)
            return replace(job, program=replace(job.program, moves=(*job.program.moves[:-1], shorter)))

    assert red("test_reads_are_exact", mutant(Lacking))


def test_a_component_that_is_written_beside_its_units() -> None:
    class Beside(Wrapped):
        def read(self, jobs: Sequence[ReadJob]) -> ReadHandle:
            return super().read([*jobs, *(replace(job, dst_units=job.dst_units % 20 + 1) for job in jobs)])

    assert red("test_reads_are_exact", mutant(Beside))


def test_jobs_that_start_before_all_are_checked() -> None:
    class OneByOne(Wrapped):
        def read(self, jobs: Sequence[ReadJob]) -> ReadHandle:
            handle = super().read([])
            for job in jobs:
                handle = super().read([job])
            return handle

    assert red("test_wrong_units_are_refused", mutant(OneByOne))
    assert red("test_unknown_groups_are_refused", mutant(OneByOne))


def test_quiet_that_does_not_wait() -> None:
    class Hasty(Wrapped):
        def quiesce(self, timeout_s: float) -> bool:
            return True

    assert red("test_quiet_means_over", mutant(Hasty, Slow))


def test_a_peer_that_never_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    class Immortal(Wrapped):
        def alive(self) -> bool:
            return True

    monkeypatch.setattr(transports, "TIMEOUT_S", 0.2)
    assert red("test_the_peer_is_gone", mutant(Immortal))
    assert red("test_closed_connections_read_nothing", mutant(Immortal))


def test_a_descriptor_that_stays_open() -> None:
    kept: list[int] = []

    class Leaking(Wrapped):
        def close(self) -> None:
            kept.append(os.dup(0))
            super().close()

    try:
        assert red("test_leaves_nothing_behind", mutant(Leaking))
    finally:
        for fd in kept:
            os.close(fd)


def test_a_transport_that_does_not_serve_the_cpu_is_skipped_with_its_reason() -> None:
    class Elsewhere(ShmTransport):
        def supports(self, device: str, layout: object) -> Support:
            return unsupported("serves memory of accelerators only")

    checks = run([Case("transports", "elsewhere", TransportSuite, {"new_transport": lambda: Elsewhere})])
    assert {(check.outcome, check.reason) for check in checks} == {
        ("skipped", "arenas on cpu: serves memory of accelerators only")
    }

"""``kvcore run`` as a user starts it, and what is left of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def _heed_interrupts() -> None:
    """Test runners that spread tests over processes ignore SIGINT in them, and a child would inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Run:
    """A ``kvcore run`` under way; its stderr is collected with times."""

    def __init__(self, *options: str) -> None:
        code = "import sys; from kvcore.cli.main import main; sys.exit(main())"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "run", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "200"},
            preexec_fn=_heed_interrupts,
        )
        self.lines: list[tuple[float, str]] = []
        self._ended = False
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._more:
                self.lines.append((time.monotonic(), line.strip()))
                self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()

    def wait_line(self, pattern: str, seconds: float = 120.0) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        with self._more:
            while True:
                for _, line in self.lines:
                    if found := re.search(pattern, line):
                        return found
                left = deadline - time.monotonic()
                assert left > 0, f"no line {pattern!r} in {self.text}"
                assert not self._ended, f"it ended without a line {pattern!r}: {self.text}"
                self._more.wait(left)

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def pids(self) -> dict[str, int]:
        found = self.wait_line(r"prefill process (\d+), decode process (\d+)")
        return {"prefill": int(found[1]), "decode": int(found[2])}

    def end(self, seconds: float = 240.0) -> tuple[int, str]:
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        code = self.process.wait(timeout=seconds)
        self._reader.join(timeout=5)
        return code, out


def ended(pid: int, seconds: float = 20.0) -> bool:
    """Whether a process ends, by itself or not; its parent may not have noticed yet."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def gone(pid: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists():
            return True
        time.sleep(0.05)
    return False


def prompt_file(path: Path, prompt, shapes) -> str:
    lines = [
        {"id": f"r{n}", "token_ids": list(prompt(length, n)), "max_new_tokens": new} for n, (length, new) in shapes
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def children(pid: int) -> list[int]:
    """Process ids whose parent is ``pid``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, NotADirectoryError):
            continue
        if entry.name.isdigit() and int(fields[1]) == pid:
            found.append(int(entry.name))
    return found

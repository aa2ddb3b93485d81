"""``kvcore run --model guard`` as a person starts it: real processes, everything a request carries, counted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]  # four processes, each with torch and a whole model

COMPONENTS = {"full/kv", "full/block_scale", "swa/kv", "swa/block_scale", "state/conv"}


def test_one_command_shows_what_a_request_carries(tmp_path):
    """Five components at once, of each the bytes that were moved and saved; right answers although requests gave way."""
    code = "import sys; from kvcore.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "run", "--model", "guard", "--count", "16", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["requests"], report["failed"], report["format"]) == (16, 0, "mxfp8")
    assert report["accuracy"] >= 0.98
    assert report["agreement"] == 1.0
    assert report["agreement_plain"] >= 0.98
    assert report["retractions"] > 0
    assert (report["resumed"], report["recomputed"]) == (report["retractions"], 0)
    assert set(report["bytes_moved"]) == set(report["bytes_saved"]) == COMPONENTS
    assert all(report["bytes_moved"].values())
    assert all(report["bytes_saved"].values())
    # What a prompt of 100 tokens has: pages of 8, two layers of full attention, one whose window keeps five pages.
    page = 8 * 2 * 2 * 32
    assert report["bytes_moved"]["full/kv"] == 16 * 13 * 2 * page
    assert report["bytes_moved"]["swa/kv"] == 16 * 5 * page
    assert report["bytes_moved"]["state/conv"] == 16 * 3 * 4 * 64 * 3 * 4
    assert report["bytes_saved"]["state/conv"] == report["retractions"] * 3 * 4 * 64 * 3 * 4
    assert {len(item["tokens"]) for item in report["results"]} == {22}

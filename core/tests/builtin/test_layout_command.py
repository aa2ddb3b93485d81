"""``kvcore layout``: every byte of a unit is named, and what differs between two formats is."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvcore.builtin.commands.layout import differences, draw, letters, parse_format, share
from kvcore.cli.main import main
from kvcore.contract import Format
from kvcore.errors import ConfigError
from kvcore.layout import Axis, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.spec import LayerGroup, TensorSpec

Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *args: str) -> dict:
    assert main(["layout", *args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_fields_cover_the_unit_and_sizes_are_those_of_the_geometry(capsys: Capture) -> None:
    shape = ("--page-size", "3", "--kv-heads", "1", "--heads", "1", "--head-dim", "3", "--layers", "5")
    said = run(capsys, "fp16", *shape)
    assert [item["name"] for item in said["regions"]] == ["k", "v"]
    for item in said["regions"]:
        end = 0
        for field in item["fields"]:
            assert field["offset"] == end
            end += field["nbytes"]
        assert end == item["unit_bytes"] == 32
        assert (item["logical_bytes"], item["alignment_bytes"]) == (3 * 1 * 3 * 2, 14)
        assert [field["kind"] for field in item["fields"]] == ["data", "alignment"]
    assert said["envelope_bytes"] == 5 * 2 * 32
    assert said["bytes_per_token"] == {"full/kv": 5 * 2 * 3 * 2}
    assert said["alignment_bytes_per_token"] == pytest.approx(5 * 2 * 14 / 3)


SAMPLED = LayerGroup("own", (4,), (TensorSpec("k", 3, 8), TensorSpec("v", 3, 8), TensorSpec("z", 1, 16, sharded=False)))


def test_without_geometry_a_format_shows_the_group_it_samples(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(Format, "sample_groups", lambda self: (SAMPLED,))
    said = run(capsys, "bf16")
    assert (said["group"], said["layers"], [item["name"] for item in said["regions"]]) == ("own", [4], ["k", "v", "z"])
    assert run(capsys, "bf16", "--diff", "fp32")["other"]["group"] == "own"
    for option, value in (("--heads", "8"), ("--kv-heads", "2"), ("--head-dim", "64"), ("--layers", "2")):
        assert run(capsys, "bf16", option, value)["group"] == "full"  # what is said counts, though it is the default
    for options, group in (((), "own"), (("--layers", "2"), "full")):
        assert main(["explain", "--format", "bf16", "--json", *options]) == 0
        assert list(json.loads(capsys.readouterr().out)["groups"]) == [group]


def test_a_format_that_samples_none_shows_keys_and_values(capsys: Capture) -> None:
    assert run(capsys, "bf16")["group"] == "full"


def test_options_of_a_format_come_with_its_name(capsys: Capture) -> None:
    orders = {}
    for order in ("head_major", "token_major"):
        said = run(capsys, f"bf16:order={order}")
        orders[order] = {field["order"] for item in said["regions"] for field in item["fields"]}
    assert orders == {"head_major": {"head slot dim"}, "token_major": {"slot head dim"}}


def test_options_of_the_configuration_are_those_of_its_own_format(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "kvcore.toml"
    path.write_text('[cache]\nformat = "bf16"\npage_size = 4\nformat_options = {order = "token_major"}\n')
    for name, order in (
        ("bf16", "slot head dim"),
        ("fp16", "head slot dim"),
        ("bf16:order=head_major", "head slot dim"),
    ):
        said = run(capsys, name, "--config", str(path))
        assert said["regions"][0]["fields"][0]["order"] == order
        assert said["spaces"][0]["tokens_per_unit"] == 4


def test_difference_of_two_orders_can_be_converted(capsys: Capture) -> None:
    said = run(capsys, "bf16", "--diff", "bf16:order=token_major")
    assert said["differences"] == [
        {"path": f"regions.{name}.fields.x.order", "left": "head slot dim", "right": "slot head dim"} for name in "kv"
    ]
    assert said["conversion"]["possible"] is True
    assert said["conversion"]["moves"] == 2
    assert said["layout"]["fingerprint"] != said["other"]["fingerprint"]


def test_difference_of_two_formats_names_what_forbids_a_conversion(capsys: Capture) -> None:
    said = run(capsys, "bf16", "--diff", "fp32")
    paths = {row["path"]: (row["left"], row["right"]) for row in said["differences"]}
    assert paths["format"] == ("bf16", "fp32")
    assert paths["regions.k.fields.x.dtype"] == ("bf16", "fp32")
    assert said["conversion"]["possible"] is False
    assert "format" in said["conversion"]["reason"]


def test_equal_layouts_have_no_difference_and_move_whole_units(capsys: Capture) -> None:
    said = run(capsys, "bf16", "--diff", "bf16:order=head_major")
    assert said["differences"] == []
    assert said["conversion"] == {"possible": True, "moves": 1, "whole_units": True}


def test_what_only_one_side_has_is_a_difference() -> None:
    def one(*names: str) -> Layout:
        regions = tuple(
            region(name, "full/kv", [Field("x", "u8", "slot", (Axis("slot", 4),))], ranges=("pages",)) for name in names
        )
        spaces, ranges = (SpaceSpec("full", "sequence", "page", 4),), (UnitRange("pages", "full"),)
        return Layout("f", 1, "full", (0,), regions, spaces, ranges)

    rows = differences(one("a", "b"), one("b"))
    assert {row["path"].split(".")[1] for row in rows} == {"a"}
    assert all(row["right"] is None for row in rows)


def test_picture_shows_every_field_and_its_offset(capsys: Capture) -> None:
    assert main(["layout", "fp16", "--page-size", "3", "--kv-heads", "1", "--head-dim", "3"]) == 0
    text = capsys.readouterr().out
    assert "region k: 32 B a unit" in text
    assert "0–17" in text
    assert "18–31" in text
    assert "[AAA" in text
    assert "·]" in text
    assert main(["layout", "bf16", "--diff", "bf16:order=token_major"]) == 0
    text = capsys.readouterr().out
    assert "regions.k.fields.x.order" in text
    assert "2 strided moves" in text
    assert main(["layout", "bf16", "--diff", "bf16"]) == 0
    assert "no difference" in capsys.readouterr().out


def test_a_small_field_is_drawn_and_told_apart() -> None:
    """Scales beside packed values: one byte of 257 still has a cell."""
    fields = [
        Field("q", "u8", "slot dim", (Axis("slot", 1), Axis("dim", 256))),
        Field("s", "u8", "slot", (Axis("slot", 1),), offset=256),
    ]
    layout = Layout(
        "f",
        1,
        "full",
        (0,),
        (region("kv", "full/kv", fields, ranges=("pages",)),),
        (SpaceSpec("full", "sequence", "page", 1),),
        (UnitRange("pages", "full"),),
    )
    out = io.StringIO()
    draw(layout, Console(file=out, width=60))
    bar = next(line for line in out.getvalue().splitlines() if line.startswith("[A"))
    assert len(bar) == 60
    assert (bar.count("B"), bar.count("·")) == (1, 3)
    assert letters(layout.regions[0].fields) == ["A", "B", "·"]


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=20), st.integers(20, 200))
def test_cells_are_shared_out_whole(sizes: list[int], cells: int) -> None:
    out = share(sizes, cells)
    assert min(out) >= 1
    assert sum(out) >= cells
    if max(sizes) * cells >= len(sizes) * sum(sizes):  # the largest can give the others their cell
        assert sum(out) == cells


def test_options_are_read_as_values() -> None:
    assert parse_format("f") == ("f", {})
    assert parse_format("f:a=1,b=true,c=word") == ("f", {"a": 1, "b": True, "c": "word"})
    with pytest.raises(ConfigError, match="name=value"):
        parse_format("f:order")


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("bf61",), "did you mean"),
        (("bf16", "--diff", "fp61"), "did you mean"),
        (("bf16:odrer=head_major",), "did you mean 'order'?"),
        (("bf16", "--heads", "3", "--kv-heads", "2"), "multiple"),
        (("bf16", "--page-size", "0"), "page_size"),
    ],
)
def test_what_is_wrong_is_one_message(capsys: Capture, args: tuple[str, ...], word: str) -> None:
    assert main(["layout", *args]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert word in said.err


@pytest.mark.parametrize(
    ("args", "kv_heads"),
    [
        (("--kv-heads", "3"), 3),
        (("--kv-heads", "5"), 5),
        (("--kv-heads", "16"), 16),
        (("--heads", "7"), 1),
        (("--heads", "6"), 2),
        ((), 2),
    ],
)
def test_heads_that_are_not_given_fit_those_that_are(capsys: Capture, args: tuple[str, ...], kv_heads: int) -> None:
    said = run(capsys, "bf16", *args)
    axes = {axis["name"]: axis["size"] for axis in said["regions"][0]["fields"][0]["axes"]}
    assert axes["head"] == kv_heads


@pytest.mark.parametrize(
    "args",
    [
        ("--layers", "100000000"),
        ("--head-dim", "100000000000000000000"),
        ("--page-size", "1000000000000"),
        ("fp32:order=" + "[" * 100_000,),
    ],
)
def test_what_nobody_means_is_refused_at_once(capsys: Capture, args: tuple[str, ...]) -> None:
    assert main(["layout", *(args if args[0].startswith("fp32") else ("fp32", *args))]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)

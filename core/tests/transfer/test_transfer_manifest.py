"""The handshake: what cannot be converted is refused by name, before any buffer is touched."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import HandshakeError, KVCoreError, LayoutError, ProtocolError
from kvcore.layout import Axis, Field, SpaceSpec, UnitRange, region
from kvcore.layout.moves import run_program
from kvcore.transfer.messages import control
from kvcore.transfer.messages.control import PROTOCOL
from kvcore.transfer.messages.manifest import MAX_MANIFEST_BYTES, check_peers, decode_manifest, new_instance
from kvcore.transfer.session.handshake import remote_manifest
from kvcore.transfer.session.plan import plan_peer


def _other(kit: ModuleType, field: str) -> tuple[Any, Any, Any]:
    """A sender's manifest that differs in one field, and the values the error has to name (receiver's, sender's)."""
    lay = kit.layout
    plain = lay()
    layouts = {
        "format": (lay(format="other"), "test", "other"),
        "format revision": (lay(revision=2), 1, 2),
        "page size": (lay(page=8), 4, 8),
        "dim size": (lay(dim=16), 8, 16),
        "head size": (lay(heads=4), 2, 4),
        "dtype": (lay(dtype="bf16"), "fp32", "bf16"),
        "regions": (lay(scales=False), ["k", "s", "v"], ["k", "v"]),
        "layers": (lay(layers=(0,)), (0, 1), (0,)),
        "head ids": (lay(ids=((4, 6),)), 2, ((4, 6),)),
        "unit ranges": (
            msgspec.structs.replace(
                plain,
                ranges=(UnitRange("other", "full"),),
                regions=tuple(msgspec.structs.replace(r, ranges=("other",)) for r in plain.regions),
            ),
            ["pages"],
            ["other"],
        ),
        "index space": (
            msgspec.structs.replace(plain, spaces=(SpaceSpec("full", "ring", "page", 4),)),
            str(SpaceSpec("full", "sequence", "page", 4)),
            str(SpaceSpec("full", "ring", "page", 4)),
        ),
        "component": (
            msgspec.structs.replace(
                plain, regions=(*plain.regions[:2], msgspec.structs.replace(plain.regions[2], component="full/other"))
            ),
            "full/scale",
            "full/other",
        ),
        "fields": (
            msgspec.structs.replace(
                plain,
                regions=(
                    *plain.regions[:2],
                    region(
                        "s", "full/scale", [Field("t", "u8", "slot head", (Axis("slot", 4), Axis("head", 2)))],
                        ranges=("pages",),
                    ),
                ),
            ),
            ["s"],
            ["t"],
        ),
    }  # fmt: skip
    if field in layouts:
        item, mine, theirs = layouts[field]
        units = {"full": {name.name: 64 for name in item.ranges}}
        sender = kit.manifest("sender", "s")
        return msgspec.structs.replace(sender, layouts={"full": item}, units=units), mine, theirs
    changes: dict[str, tuple[Any, Any, Any]] = {
        "protocol": ((2, 0), "1.0", "2.0"),
        "model": ("n" * 64, "m" * 64, "n" * 64),
        "transport": ("mooncake", "shm", "mooncake"),
        "role": ("receiver", "receiver", "receiver"),
        "instance": ("r", "r", "r"),
    }
    value, mine, theirs = changes[field]
    sender = kit.manifest("sender", "s")
    return msgspec.structs.replace(sender, **{field: value}), mine, theirs


@pytest.mark.parametrize(
    "field",
    [
        "protocol", "model", "transport", "role", "instance", "format", "format revision", "page size", "dim size",
        "head size", "dtype", "regions", "unit ranges", "index space", "component", "fields",
    ],
)  # fmt: skip
def test_each_difference_is_refused_by_name(kit: ModuleType, field: str) -> None:
    """I1: the error names the field and both values, on whichever side it is found."""
    sender, mine, theirs = _other(kit, field)
    receiver = kit.manifest("receiver", "r")
    with pytest.raises(HandshakeError) as found:
        plan_peer(receiver, sender)
    facts = found.value.fields
    assert (facts["field"], facts["local"], facts["remote"]) == (field, mine, theirs)
    with pytest.raises(HandshakeError) as found:
        check_peers(sender, receiver)
    facts = found.value.fields
    assert (facts["field"], facts["local"], facts["remote"]) == (field, theirs, mine)


@pytest.mark.parametrize("what", ["layers", "head ids", "groups"])
def test_what_the_sender_lacks_is_refused_by_name(kit: ModuleType, what: str) -> None:
    """I1: a receiver's group, layer or head that no rank of the sender holds; the other way round is no reason."""
    lay, part = kit.layout(), {"full": kit.layout(heads=4, ids=((0, 4),))}
    more = kit.manifest("receiver", "r", **{
        "layers": {"layouts": {"full": kit.layout(layers=(0, 1, 7))}},
        "head ids": {"layouts": part},
        "groups": {"layouts": {"full": lay, "draft/full": lay}},
    }[what])  # fmt: skip
    if what == "groups":
        more = msgspec.structs.replace(more, units={"full": {"pages": 64}, "draft/full": {"pages": 64}})
    with pytest.raises(HandshakeError) as found:
        plan_peer(more, kit.manifest("sender", "s"))
    assert found.value.fields["field"] == what
    turned = msgspec.structs.replace(more, role="sender", instance="s")
    plan_peer(kit.manifest("receiver", "r"), turned)


def test_constants_that_both_hold_must_agree(kit: ModuleType) -> None:
    """A3: payloads that were scaled by another calibration are refused at hello, by name; ids of one side do not count."""
    mine = {"full": {"0/k_scale/x/head=0": "aa", "0/k_scale/x/head=1": "bb"}}
    theirs = {"full": {"0/k_scale/x/head=1": "bb", "0/k_scale/x/head=2": "cc"}}
    receiver = kit.manifest("receiver", "r", constants=mine)
    plan_peer(receiver, kit.manifest("sender", "s", constants=theirs))
    theirs["full"]["0/k_scale/x/head=0"] = "ab"
    with pytest.raises(HandshakeError) as found:
        plan_peer(receiver, kit.manifest("sender", "s", constants=theirs))
    facts = found.value.fields
    assert (facts["field"], facts["constant"]) == ("constants", "0/k_scale/x/head=0")
    assert (facts["local"], facts["remote"]) == ("aa", "ab")


def test_minor_version_is_no_reason_to_refuse(kit: ModuleType) -> None:
    newer = msgspec.structs.replace(kit.manifest("sender", "s"), protocol=(PROTOCOL[0], PROTOCOL[1] + 5))
    plan_peer(kit.manifest("receiver", "r"), newer)


@pytest.mark.parametrize("arena", ["page_major", "layer_major"])
def test_plan_moves_everything_together_and_each_component_alone(kit: ModuleType, arena: str) -> None:
    sender = kit.manifest("sender", "s", kit.layout(arena=arena))
    receiver = kit.manifest("receiver", "r", kit.layout(arena=arena), units=16)
    plan = plan_peer(receiver, sender)
    assert set(plan.programs["full"]) == {kit.COMPONENTS, ("full/kv",), ("full/scale",)}
    names, (together,) = plan.split("full", "pages", ("full/scale", "full/kv"))
    assert names == kit.COMPONENTS
    # 2 layers of k and v: 4 slots, 2 heads, 8 dims of fp32; one byte a head and slot of scales (the unit is padded)
    assert dict(together.unit_bytes) == {"full/kv": 2 * 2 * 4 * 2 * 8 * 4, "full/scale": 2 * 4 * 2}
    assert together.whole_units
    if arena == "page_major":
        assert len(together.moves) == 1, "a whole envelope is one raw move"
    names, (alone,) = plan.split("full", "pages", ("full/scale",))
    assert (names, set(alone.unit_bytes)) == (("full/scale",), {"full/scale"})
    _, (layer,) = plan.split("full", "pages", kit.COMPONENTS, (1,))
    assert dict(layer.unit_bytes) == {"full/kv": 2 * 4 * 2 * 8 * 4, "full/scale": 4 * 2}, "one layer of two"


def test_what_can_be_converted_is_planned(kit: ModuleType) -> None:
    """Another axis order, another arena order, more layers and more heads at the sender: bytes arrive by id."""
    there = kit.layout("head slot dim", layers=(0, 1, 2), arena="layer_major", heads=4, ids=((0, 4),))
    here = kit.layout("slot head dim", layers=(2, 0), heads=2, ids=((2, 4),))
    sender, receiver = kit.manifest("sender", "s", there, units=8), kit.manifest("receiver", "r", here, units=4)
    plan = plan_peer(receiver, sender)
    _, (program,) = plan.split("full", "pages", kit.COMPONENTS)
    src = np.random.default_rng(1).integers(0, 255, sender.placement("full").arena_bytes, np.uint8)
    dst = np.full(receiver.placement("full").arena_bytes, 0xFF, np.uint8)
    run_program(program, src, dst, [5], [2])

    def element(array: Any, manifest: Any, unit: int, layer: int, **at: int) -> bytes:
        buffer = manifest.placement("full").buffer(layer, "v")
        field = manifest.layouts["full"].region("v").field("x")
        place = buffer.base + unit * buffer.unit_stride + int(field.offsets(**at))
        return bytes(array[place : place + 4])

    for layer in (0, 2):
        for slot in range(4):
            for head in range(2):
                for dim in range(8):
                    want = element(src, sender, 5, layer, slot=slot, head=head + 2, dim=dim)
                    assert element(dst, receiver, 2, layer, slot=slot, head=head, dim=dim) == want


def test_plan_refuses_ids_outside_the_peer(kit: ModuleType) -> None:
    plan = plan_peer(kit.manifest("receiver", "r", units=8), kit.manifest("sender", "s", units=16))
    plan.check_source("full", "pages", kit.COMPONENTS, np.array([1, 15]))
    plan.check_destination("full", "pages", np.array([1, -1, 7]))
    for bad in (0, -1, 16):
        with pytest.raises(ProtocolError, match="out of range"):
            plan.check_source("full", "pages", kit.COMPONENTS, np.array([1, bad]))
    for bad in ([0], [-2], [8], [3, 3]):
        with pytest.raises(LayoutError):
            plan.check_destination("full", "pages", np.array(bad))
    for components in (("full/other",), ("full/kv", "full/kv")):
        with pytest.raises(ProtocolError):
            plan.split("full", "pages", components)
    with pytest.raises(ProtocolError):
        plan.split("full", "other", kit.COMPONENTS)


def test_manifest_survives_the_wire(kit: ModuleType) -> None:
    item = kit.manifest("sender", new_instance(), endpoint=b"\x00\xff")
    again = decode_manifest(item.encode())
    assert again == item
    assert again.layouts["full"].fingerprint() == item.layouts["full"].fingerprint()
    assert new_instance() != new_instance()


@given(data=st.data())
def test_broken_manifests_are_typed_errors(kit: ModuleType, data: st.DataObject) -> None:
    good = kit.manifest("sender", "s").encode()
    cut = data.draw(st.integers(0, len(good) - 1))
    flip = data.draw(st.integers(0, len(good) - 1))
    changed = bytearray(good)
    changed[flip] ^= data.draw(st.integers(1, 255))
    for broken in (good[:cut], data.draw(st.binary(max_size=200))):
        with pytest.raises(ProtocolError):
            decode_manifest(broken)
    with contextlib.suppress(KVCoreError):
        plan_peer(kit.manifest("receiver", "r"), decode_manifest(bytes(changed)))


def _swollen(kit: ModuleType, what: str) -> dict[str, Any]:
    """A manifest that is small as bytes and large as a cache."""
    plain: dict[str, Any] = msgspec.msgpack.decode(kit.manifest("receiver", "r").encode())
    layout = plain["layouts"]["full"]
    regions = layout["regions"]
    if what == "id ranges":
        for part in regions:
            for field in part["fields"]:
                for axis in field["axes"]:
                    if axis["name"] == "head":
                        axis["ids"] = [(2 * n, 2 * n + 1) for n in range(20_000)]
    elif what == "layers":
        layout["layers"] = list(range(10_000))
    elif what == "buffers":
        layout["layers"] = list(range(1000))
        layout["regions"] = [{**regions[0], "name": f"k{n}"} for n in range(200)]
    elif what == "regions":
        layout["regions"] = [{**regions[0], "name": f"k{n}"} for n in range(300)]
    elif what == "groups":
        plain["layouts"] = {f"g{n}": layout for n in range(100)}
        plain["units"] = {f"g{n}": {"pages": 8} for n in range(100)}
    elif what == "axes":
        layout["regions"] = [{**regions[0], "name": f"k{n}", "fields": regions[0]["fields"] * 8} for n in range(100)]
    elif what == "bytes":
        plain["endpoint"] = b"x" * MAX_MANIFEST_BYTES
    return plain


@pytest.mark.parametrize("what", ["id ranges", "layers", "regions", "buffers", "groups", "axes", "bytes"])
def test_a_manifest_is_bounded(kit: ModuleType, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted before anything is built of it, however few bytes it takes."""

    def build(self: Any) -> None:
        raise AssertionError("built")

    data = msgspec.msgpack.encode(_swollen(kit, what))
    monkeypatch.setattr(Axis, "__post_init__", build)
    with pytest.raises(ProtocolError):
        decode_manifest(data)


@pytest.mark.parametrize(
    ("field", "value"), [("model", "n" * 64), ("role", "sender"), ("checksum", "crc32"), ("transport", "other")]
)
def test_what_is_cheap_is_compared_first(
    kit: ModuleType, field: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger of another model is refused before any of its layouts is looked at, and so is another format."""
    plain: dict[str, Any] = msgspec.msgpack.decode(kit.manifest("receiver", "r").encode())
    mine = kit.manifest("sender", "s")
    monkeypatch.setattr(Axis, "__post_init__", lambda self: pytest.fail("built"))
    hello = control.Hello(src="r", dst="", protocol=PROTOCOL, manifest=msgspec.msgpack.encode({**plain, field: value}))
    with pytest.raises(HandshakeError) as found:
        remote_manifest(mine, hello)
    assert (found.value.fields["field"], found.value.fields["remote"]) == (field, value)
    plain["layouts"]["full"]["format"] = "other"
    hello = control.Hello(src="r", dst="", protocol=PROTOCOL, manifest=msgspec.msgpack.encode(plain))
    with pytest.raises(HandshakeError) as found:
        remote_manifest(mine, hello)
    assert found.value.fields["field"] == "format"

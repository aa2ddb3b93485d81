"""The page of the wire protocol, held against the messages of the code: every one, every field, every limit."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import msgspec
import pytest

from kvcore.requests.payload import Payload
from kvcore.spec import Ranks
from kvcore.transfer.messages import control, manifest
from kvcore.transfer.messages.manifest import Manifest
from kvcore.transfer.session.checksums import MAX_CHECKED_BYTES
from kvcore.transfer.session.greeting import MAX_UNREAD_BYTES
from kvcore.transfer.session.waiting import MAX_WAITING_ASKS, MAX_WAITING_TOTAL
from kvcore.transfer.wire import budget
from kvcore.transfer.wire.strangers import MAX_STRANGERS, MAX_UNSEEN_BYTES

PAGE = (Path(__file__).parents[1] / "docs" / "protocol.md").read_text()
MESSAGES = {cls.__struct_config__.tag: cls for cls in typing.get_args(control.AnyMessage)}
SECTIONS = {title.strip("`"): text for title, text in re.findall(r"^### (.+)\n((?:(?!^##).*\n?)*)", PAGE, re.MULTILINE)}


def listed(section: str) -> list[str]:
    """The fields of a section's table, in order."""
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", SECTIONS[section], re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


def fields(cls: type[msgspec.Struct]) -> list[str]:
    return [name for name in cls.__struct_fields__ if name not in ("src", "dst")]


def test_every_message_has_a_section_and_no_section_is_of_something_else() -> None:
    in_messages = PAGE.partition("## Messages")[2].partition("## What messages are made of")[0]
    assert re.findall(r"^### `(\w+)`$", in_messages, re.MULTILINE) == list(MESSAGES)


@pytest.mark.parametrize("tag", sorted(MESSAGES))
def test_a_message_is_described_field_by_field(tag: str) -> None:
    assert listed(tag) == fields(MESSAGES[tag])


@pytest.mark.parametrize("tag", sorted(MESSAGES))
def test_who_sends_a_message_is_what_the_code_says(tag: str) -> None:
    said = re.match(r"\n\*([\w →]+)\*", SECTIONS[tag])
    assert said is not None
    documented = (MESSAGES[tag].__doc__ or "").lower()
    assert documented.startswith(said[1].lower())


@pytest.mark.parametrize(
    ("section", "cls"), [("Payloads", Payload), ("The manifest", Manifest), ("Errors", control.WireError)]
)
def test_what_messages_are_made_of_is_described_field_by_field(section: str, cls: type[msgspec.Struct]) -> None:
    assert listed(section) == list(cls.__struct_fields__)


@pytest.mark.parametrize(
    ("section", "cls"),
    [
        ("taken", control.TakenPart),
        ("taken", control.TakenField),
        ("taken", control.TakenIds),
        ("heartbeat", control.Renewal),
        ("The manifest", Ranks),
    ],
)
def test_smaller_parts_name_their_fields(section: str, cls: type[msgspec.Struct]) -> None:
    named = set(re.findall(r"`(\w+)`", SECTIONS[section]))
    assert set(cls.__struct_fields__) <= named


def test_every_message_carries_who_wrote_it_and_for_whom() -> None:
    assert control.Message.__struct_fields__ == ("src", "dst")
    assert all(cls.__struct_fields__[:2] == ("src", "dst") for cls in MESSAGES.values())
    for name in ("src", "dst", "type"):
        assert f"`{name}`" in PAGE


def test_limits_and_version() -> None:
    limits = {
        "length of a message": control.MAX_MESSAGE_BYTES,
        "`engine_data`": control.MAX_ENGINE_DATA_BYTES,
        "token of a request": control.MAX_TOKEN_BYTES,
        "request id": control.MAX_REQUEST_ID,
        "instance id": control.MAX_INSTANCE_ID,
        "attempts renewed by a heartbeat": control.MAX_RENEWALS,
        "asks waiting for what is not begun": MAX_WAITING_ASKS,
        "asks waiting in all": MAX_WAITING_TOTAL,
        "text of an error": control.MAX_ERROR_TEXT,
        "fields of an error": control.MAX_ERROR_BYTES,
        "nesting of an error's fields": control.MAX_ERROR_DEPTH,
        "unit under checksums": MAX_CHECKED_BYTES,
        "manifests waiting to be read": MAX_UNREAD_BYTES,
        "connections without a hello": MAX_STRANGERS,
        "messages before an accepted hello": budget.MAX_FIRST_MESSAGES,
        "bytes without a whole message": MAX_UNSEEN_BYTES,
        "messages unread in a socket": budget.RECEIVE_QUEUE,
        "messages unsent in a socket": budget.SEND_QUEUE,
        "bytes unsent beyond them": budget.MAX_UNSENT_BYTES,
        "manifest": manifest.MAX_MANIFEST_BYTES,
        "layers of a group": manifest.MAX_LAYERS,
        "regions of a group": manifest.MAX_REGIONS,
        "layers times regions": manifest.MAX_BUFFERS,
        "axes of a manifest": manifest.MAX_AXES,
        "ranges of global ids": manifest.MAX_ID_RANGES,
    }
    rates = {
        "messages of a peer in a second": budget.MESSAGES_PER_S,
        "bytes of a peer in a second": budget.BYTES_PER_S,
    }
    for what, value in rates.items():
        assert f"| {what} | {value}, and {value * budget.BURST_S} at once" in PAGE
    assert f"counts as {budget.HELLO_WEIGHT} |" in PAGE
    assert f"| {budget.TURN_MESSAGES} from a socket, or {budget.TURN_BYTES} bytes" in PAGE
    for what, value in limits.items():
        assert f"| {what} | {value} " in PAGE
    assert f"| groups of a manifest | {manifest.MAX_GROUPS}, " in PAGE
    assert "now {}.{}.".format(*control.PROTOCOL) in PAGE

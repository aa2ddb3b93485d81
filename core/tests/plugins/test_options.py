"""Options of a configuration against what constructors take: refused where they are configured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from kvcore.contract import Transport
from kvcore.errors import ConfigError, PluginError
from kvcore.plugins import load_plugins
from kvcore.plugins.options import checked_options
from kvcore.plugins.registry import Registry

if TYPE_CHECKING:
    from nowhere import Absent


class Wire:
    """What is written in a program."""


class Takes:
    def __init__(
        self,
        count: int = 1,
        share: float = 0.5,
        size: int | str = "1MiB",
        on: bool = True,
        word: Literal["inline", "thread"] = "inline",
        names: tuple[str, ...] = (),
        table: dict[str, int] | None = None,
        where: Path = Path(),
        wire: Wire | None = None,
        loose: Absent = None,
        bare=None,  # type: ignore[no-untyped-def]
    ) -> None: ...


class Needs:
    def __init__(self, *, host: str) -> None: ...


class Bare: ...


class Open:
    def __init__(self, **options: Any) -> None: ...


WIRE = Wire()


@pytest.mark.parametrize(
    ("option", "given", "taken"),
    [
        ("count", 3, 3),
        ("share", 1, 1.0),
        ("size", 5, 5),
        ("size", "5MiB", "5MiB"),
        ("on", False, False),
        ("word", "thread", "thread"),
        ("names", ["a", "b"], ("a", "b")),
        ("table", {"a": 1}, {"a": 1}),
        ("table", None, None),
        ("where", "some/where", Path("some/where")),
        ("wire", WIRE, WIRE),
        ("wire", None, None),
        ("loose", [1, "x"], [1, "x"]),
        ("bare", {"x": 1}, {"x": 1}),
    ],
)
def test_values_of_the_type_are_taken(option: str, given: Any, taken: Any) -> None:
    got = checked_options(Takes, {option: given}, {})[option]
    assert got == taken
    assert type(got) is type(taken)


@pytest.mark.parametrize(
    ("option", "given", "expected"),
    [
        ("count", "3", "int"),
        ("count", True, "int"),
        ("count", 1.5, "int"),
        ("count", None, "int"),
        ("share", "half", "float"),
        ("size", True, "int or str"),
        ("on", 1, "bool"),
        ("word", "inlne", "'inline' or 'thread'"),
        ("names", "ab", "tuple[str, ...]"),
        ("names", [1], "tuple[str, ...]"),
        ("table", {"a": "b"}, "dict[str, int]"),
        ("where", 3, "Path"),
        ("wire", "inline", "Wire"),
    ],
)
def test_values_of_another_type_are_refused(option: str, given: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match="wrong value of an option") as caught:
        checked_options(Takes, {option: given}, {"transport": "t"})
    fields = caught.value.fields
    assert (fields["transport"], fields["option"], fields["got"]) == ("t", option, given)
    assert fields["expected"] == expected
    assert "count" in fields["options"]
    assert "wire" not in fields["options"]  # no configuration can give it
    if option == "wire":
        assert caught.value.remedy == "leave it out: only a program can give it"
    if option == "word":
        assert caught.value.remedy == "did you mean 'inline'?"


def test_what_there_is_not_and_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="unknown option") as caught:
        checked_options(Takes, {"conut": 1}, {})
    assert caught.value.remedy == "did you mean 'count'?"
    with pytest.raises(ConfigError, match="unknown option") as none:
        checked_options(Bare, {"x": 1}, {})
    assert none.value.remedy == "it takes no options"
    with pytest.raises(ConfigError, match="an option is missing") as missing:
        checked_options(Needs, {}, {})
    assert missing.value.fields == {"options": ["host"], "option": "host"}
    assert checked_options(Open, {"self_made": 1}, {}) == {"self_made": 1}


@pytest.mark.parametrize("option", ["name", "self", "kind", "cls", "options"])
@pytest.mark.parametrize(
    ("make", "thing"), [(Registry.transport, "shm"), (Registry.backup, "host_tensor"), (Registry.format, "bf16")]
)
def test_any_word_may_be_an_option_that_is_refused(make: Any, thing: str, option: str) -> None:
    with pytest.raises(ConfigError, match="unknown option"):
        make(load_plugins(), thing, **{option: "x"})
    with pytest.raises(ConfigError, match="unknown option"):
        load_plugins().pool_builder("memfd", **{option: "x"})


def test_a_copier_of_the_configuration_is_refused_before_the_first_read() -> None:
    with pytest.raises(ConfigError, match="wrong value of an option") as caught:
        load_plugins().transport("shm", copier="inline")
    assert caught.value.fields["options"] == ["stage_bytes", "stage_readers", "stage_timeout_s"]


def test_a_constructor_that_raises_whatever_it_likes_is_named() -> None:
    class Breaks(Open):
        def __init__(self, **options: Any) -> None:
            raise {"KeyError": KeyError, "SystemExit": SystemExit, "ValueError": ValueError}[options["with"]]("x")

    registry = load_plugins()
    registry._items["transports"]["breaks"] = ("fake", Breaks)
    for raised, error in ((KeyError, PluginError), (SystemExit, PluginError), (ValueError, ConfigError)):
        with pytest.raises(error) as caught:
            registry.transport("breaks", **{"with": raised.__name__})
        assert raised.__name__ in caught.value.fields["cause"]
    assert issubclass(registry.item("transports", "shm"), Transport)

"""Errors carry their facts: as text, as a dict, through copies and over the wire."""

import copy

import pytest

from kvcore.errors import ERRORS_BY_CODE, CapacityError, KVCoreError, LayoutError, UnknownRequestError, error_from_dict


def sample() -> LayoutError:
    return LayoutError("fields overlap", region="k", expected=4, got=(1, 2), remedy="declare padding")


def test_text_names_facts_and_remedy() -> None:
    assert str(sample()) == "fields overlap (region='k', expected=4, got=(1, 2)). Remedy: declare padding"
    assert str(UnknownRequestError("no such request", request="r")) == "no such request (request='r')"


def test_round_trips() -> None:
    for again in (copy.copy(sample()), error_from_dict(sample().as_dict())):
        assert type(again) is LayoutError
        assert again.message == "fields overlap"
        assert again.remedy == "declare padding"
        assert again.fields["region"] == "k"
        assert list(again.fields["got"]) == [1, 2]


def test_fields_of_a_peer_may_have_any_name() -> None:
    error = error_from_dict({"code": "capacity", "message": "full", "fields": {"message": 1, "remedy": 2, "self": 3}})
    assert type(error) is CapacityError
    assert error.fields == {"message": 1, "remedy": 2, "self": 3}


def test_unknown_code_is_the_base_class() -> None:
    assert type(error_from_dict({"code": "from the future", "message": "?"})) is KVCoreError


@pytest.mark.parametrize("cls", sorted(ERRORS_BY_CODE.values(), key=lambda cls: cls.code))
def test_codes_are_distinct(cls: type[KVCoreError]) -> None:
    def family(base: type[KVCoreError]) -> list[type[KVCoreError]]:
        return [base, *(item for sub in base.__subclasses__() for item in family(sub))]

    assert [item for item in family(KVCoreError) if item.code == cls.code and item.__module__ == "kvcore.errors"] == [
        cls
    ]


def test_fields_nested_without_end_have_a_plain_form() -> None:
    cycle: list[object] = []
    cycle.append(cycle)
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    for value in (cycle, deep):
        error = LayoutError("m", got=value)
        assert len(str(error.as_dict())) < 5000
        assert str(error).startswith("m (got=")
    assert str(LayoutError("m", got=10**5000)).startswith("m (got=0x")

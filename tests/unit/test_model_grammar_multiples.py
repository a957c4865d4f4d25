"""Which numbers an output may have to be a multiple of."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from pilotfish_broker.errors import InvalidRequest
from pilotfish_workers.model.grammar_multiples import json_at, large_multiple
from pilotfish_workers.model.text import Text
from tests.grammar_kit import byte_level, constraint

PRIMES = [{"multipleOf": 307}, {"multipleOf": 311}]  # 95 477 together


def large(schema: Any) -> Decimal | None:
    return large_multiple(json_at(json.dumps(schema)))


@pytest.mark.parametrize(
    "multiple", [1, 7, 0.01, 0.5, 100, 65_536, 1_000_000, 99_000_000, 4e9, 1e30, 1e-30, -5, 0]
)
def test_common_ones_are_taken(multiple: float) -> None:
    assert large({"type": "number", "multipleOf": multiple}) is None


@pytest.mark.parametrize("multiple", [65_537, 999_983, 99_999_989, 86_400_000, 65_521_000])
def test_those_with_too_many_remainders_are_found(multiple: int) -> None:
    assert large({"properties": {"a": {"items": [{"multipleOf": multiple}]}}}) == multiple


def test_behind_the_point_it_is_the_digits_that_count() -> None:
    assert large({"multipleOf": 123.4567}) == Decimal("123.4567")
    assert large({"multipleOf": 1234.5}) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": PRIMES},
        {"anyOf": [PRIMES[0]], **PRIMES[1]},
        {"$defs": {"a": PRIMES[0]}, "$ref": "#/$defs/a", **PRIMES[1]},
        {"allOf": [{"multipleOf": 3.07}, {"multipleOf": 31.1}]},
    ],
)
def test_those_that_hold_together_are_taken_together(schema: Any) -> None:
    assert large(schema) is not None


def test_others_stand_for_themselves() -> None:
    assert large({"properties": dict(zip("ab", PRIMES, strict=True))}) is None
    assert large({"allOf": [{"multipleOf": 0.01}, {"multipleOf": 1000}]}) is None


def test_many_of_them_end_the_search_early() -> None:
    assert large({"allOf": [{"multipleOf": 2**k + 1} for k in range(1, 16)]}) is not None


def test_what_is_no_number_of_a_keyword_is_passed_over() -> None:
    for value in ("99999989", [99_999_989], {"type": "string"}, True, None):
        assert large({"properties": {"multipleOf": value}}) is None
    assert json_at("{") is None
    assert json_at("[" * 100_000) is None
    assert large_multiple(None) is None


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    folder: Path = tmp_path_factory.mktemp("byte-level")
    return byte_level(folder)


@pytest.mark.parametrize(
    ("field", "source"),
    [
        ("json_schema", '{"multipleOf":99999989}'),
        ("grammar", 'start: "a" %json\n {"multipl\\u0065Of": 99999989} b\nb: "c"'),
        ("grammar", '# "\nstart: %json {"multipleOf": 99999989} // "'),
    ],
)
def test_they_are_refused_before_they_are_compiled(text: Text, field: str, source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"multiple of 99999989.*65536 is the most") as caught:
        constraint(text, **{field: source})
    assert caught.value.field == field

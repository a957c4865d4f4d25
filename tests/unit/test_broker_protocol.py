"""The protocol's page against what really stands in Redis: requests, stream entries, laws."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import msgpack
import pytest

from pilotfish_broker import scripts
from pilotfish_broker.codec import FORMAT_VERSION
from pilotfish_broker.logprobs import LOGPROBS_VERSION
from pilotfish_broker.sampling import RULES, SamplingParams
from pilotfish_broker.spec import SPEC_VERSION, JobSpec

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
SPEC = JobSpec(model="m", prompt="hi", params=SamplingParams(logit_bias=((3, 1.0),)))


def section(heading: str) -> str:
    found = re.search(rf"^## {heading}$(.*?)(?=^## )", PAGE, re.M | re.S)
    assert found is not None, heading
    return found[1]


def rows(text: str, head: str) -> Iterator[list[str]]:
    """Cells of the table whose first column is named so."""
    table = re.search(rf"^\| {head} \|.*?\n\|[-|]+\n((?:\|.*\n)+)", text, re.M)
    assert table is not None, head
    for line in table[1].splitlines():
        yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("heading", "said", "version"),
    [
        ("Request", "The version is {};", SPEC_VERSION),
        ("Token stream", "the version is {}.", LOGPROBS_VERSION),
        ("Frames", "The version is {}.", FORMAT_VERSION),
    ],
)
def test_the_page_gives_the_versions_that_are_written(
    heading: str, said: str, version: int
) -> None:
    assert said.format(version) in section(heading)


def test_the_page_names_every_key_of_a_request() -> None:
    _, request = msgpack.unpackb(SPEC.to_bytes())
    assert [row[0].strip("`") for row in rows(section("Request"), "key")] == list(request)


def test_the_page_gives_every_parameter_with_its_default() -> None:
    shown = {row[0].strip("`"): row[3].strip("`") for row in rows(section("Request"), "parameter")}
    assert list(shown) == [item.name for item in fields(SamplingParams)]
    assert {name: json.loads(text) for name, text in shown.items()} == {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in asdict(SamplingParams()).items()
    }


KINDS: dict[str, Any] = {
    "integer": int,
    "float": float,
    "boolean": bool,
    "text": str,
    "array": list,
}


def test_the_page_says_in_what_form_a_parameter_is_kept() -> None:
    _, request = msgpack.unpackb(SPEC.to_bytes())
    for name, kept, *_ in rows(section("Request"), "parameter"):
        value = request["params"][name.strip("`")]
        if value is None:
            assert kept.endswith("or nil"), name
        else:
            words = [
                word for word in re.findall(r"\w+", kept.partition(" of ")[0]) if word in KINDS
            ]
            assert type(value) in [KINDS[word] for word in words], name


def test_the_page_names_every_rule() -> None:
    (given,) = (row[2] for row in rows(section("Request"), "parameter") if row[0] == "`rule`")
    assert re.findall(r"`(\w+)`", given) == list(RULES)


def test_the_page_names_every_field_of_an_entry_of_the_token_stream() -> None:
    source = scripts.source("commit")
    (fixed,) = re.findall(r"local entry = \{(.*?)\}", source)
    (optional,) = re.findall(r"ipairs\((\{\{.*?\}\})\)", source)
    (end,) = re.findall(r"'XADD', k\.tokens, '\*', '(\w)'", source)
    written = [*re.findall(r"'(\w)'", fixed), *re.findall(r"'(\w)'", optional), end]
    assert [row[0].strip("`") for row in rows(section("Token stream"), "field")] == written


def test_the_law_on_the_page_is_the_one_that_its_text_says() -> None:
    (shown,) = re.findall(r"are\s+`((?:[0-9a-f]{2} ?)+)`", section("Frames"))
    assert bytes.fromhex(shown) == struct.pack("<3I3f", 216, 28, 4052, 0.5, 0.25, 0.25)

"""What a job gives for structured output, written in the one language that llguidance takes.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import re
from typing import Any, Final

from pilotfish_broker.errors import InvalidRequest
from pilotfish_workers.model.grammar_multiples import MOST_REMAINDERS, json_at, large_multiple

__all__ = ["reason", "to_lark"]

_NO_FORCING: Final = '\n%llguidance {"no_forcing": true}\n'
"""A mask holds every way to write what must come, not only the tokenizer's own. The last such line
counts, and no line before it moves, so that the places in messages are right."""
_MAX_REASON: Final = 400
_NO_BROKEN_ESCAPE: Final = re.compile(r"(?:[^\\]|\\.)*", re.DOTALL)
_ESCAPE_OR_END: Final = re.compile(r"\\?\n|\\.|/")
_LARK: Final = re.compile(
    # strings, comments and expressions hide what is in them
    r'"(?:\\.|[^"\\])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/'
    r'|(?P<token><[^<>\s]+>)|(?P<end>\bsuffix\s*=\s*"")'
    r"|(?P<onward>\b(?:stop|max_tokens)\s*=)|(?P<warmth>\btemperature\s*=)"
)
_REFUSED: Final = {
    "token": "it names the special token {}; a grammar is over text, without special tokens",
    "end": "it has {}; an end-of-sequence token ends the output, never a part of it",
    "onward": "it has {}, which cannot be taken back when a draft is rejected; use suffix=, or a "
    "count as in /.{{0,20}}/",
    "warmth": "it sets a temperature; set it for the whole job",
}


def to_lark(field: str, source: str) -> str:
    """A schema, an expression or a grammar as a grammar in Lark's syntax.

    Args:
        field: name of the parameter: "json_schema", "regex" or "grammar".
        source: its value, as `SamplingParams` keeps it: a schema is valid JSON.

    Raises:
        InvalidRequest: what llguidance would take in another sense, or not refuse clearly.
    """
    if field == "json_schema":
        _refuse_large_multiples("JSON schema", field, json_at(source))
        return f"start: %json {source}{_NO_FORCING}"
    if field == "regex":
        return f"start: {_expression(source)}{_NO_FORCING}"
    for found in _LARK.finditer(source):
        if found.lastgroup is not None:
            told = _REFUSED[found.lastgroup].format(found[0])
            raise InvalidRequest(f"this grammar cannot be used: {told}", field="grammar")
    for part in source.split("%json")[1:]:
        _refuse_large_multiples("grammar", field, json_at(part))
    return source + _NO_FORCING


def _refuse_large_multiples(name: str, field: str, schema: Any) -> None:
    multiple = large_multiple(schema)
    if multiple is not None:
        raise InvalidRequest(
            f"this {name} cannot be used: a number would have to be a multiple of {multiple:f}, "
            f"which takes too long to follow; {MOST_REMAINDERS} is the most, or two digits and "
            "zeros",
            field=field,
        )


def _expression(source: str) -> str:
    if not _NO_BROKEN_ESCAPE.fullmatch(source):
        raise InvalidRequest(
            "this regular expression cannot be used: it ends in a single backslash", field="regex"
        )
    # a slash would end the expression, and a line's end the rule
    return f"/{_ESCAPE_OR_END.sub(_escaped, source)}/" if source else '""'


def _escaped(found: re.Match[str]) -> str:
    if found[0].endswith("\n"):
        return r"\n"
    return r"\/" if found[0] == "/" else found[0]


def reason(field: str, error: str) -> str:
    """What llguidance says is wrong, in one line, without its quotations of our own wrapping."""
    told = re.split(r"\n\s*\d+ \| |\n<", error)[0]
    place = re.match(r"(?:at )?(\d+)\(\d+\): ", told)
    told = told.removeprefix(place[0]) if place else told
    # a regular expression's parser draws a picture first
    told = " ".join(told.rpartition("\nerror: ")[2].split())
    told = told.removeprefix("failed to compile JSON schema: ")
    if place and field == "grammar":
        told = f"line {place[1]}: {told}"
    return told if len(told) <= _MAX_REASON else told[: _MAX_REASON - 1] + "…"

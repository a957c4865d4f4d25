"""Log-probabilities in the shapes of OpenAI's answers."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from pilotfish_broker.logprobs import Alternative, TokenLogprob

LEAST = -9999.0  # OpenAI's number for "very unlikely"; JSON has no minus infinity
LONGEST_TOKEN = 256  # characters


def chat_logprobs(items: Sequence[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat."""
    content = [
        {**_chat_token(item.chosen), "top_logprobs": [_chat_token(other) for other in item.top]}
        for item in items
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    items: Sequence[TokenLogprob], prompt: Sequence[TokenLogprob | None], text: str
) -> dict[str, Any]:
    """`choices[].logprobs` of a completion.

    Args:
        items: of the output's tokens.
        prompt: of the echoed prompt's tokens, None for the first; empty where it is not echoed.
        text: the visible text.
    """
    first, following = prompt[:1], [item for item in prompt if item is not None]
    known = [*following, *items]
    before = _text(following)
    word = _first_token(text, before, _text(items)) if first else ""
    offsets = [0 for _ in first]
    offsets += [len(word) + offset for offset in _offsets(following)]
    offsets += [len(word) + len(before) + offset for offset in _offsets(items)]
    return {
        "tokens": [word for _ in first] + [token_text(item.chosen.text) for item in known],
        "token_logprobs": [*first, *(_finite(item.chosen.logprob) for item in known)],
        "top_logprobs": [*first, *map(_top, known)],
        "text_offset": [min(offset, len(text)) for offset in offsets],
    }


def prompt_logprobs(items: Sequence[TokenLogprob | None]) -> list[dict[str, Any] | None]:
    """One object a token of the prompt, by token id, as vLLM has it; None for the first token."""
    return [
        None
        if item is None
        else {
            str(one.token_id): {
                "logprob": _finite(one.logprob),
                "decoded_token": token_text(one.text),
            }
            for one in (item.chosen, *item.top)
        }
        for item in items
    ]


def token_text(raw: bytes) -> str:
    """A token as text; where it is no UTF-8 by itself, its bytes, as OpenAI writes them."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _chat_token(token: Alternative) -> dict[str, Any]:
    return {
        "token": token_text(token.text),
        "logprob": _finite(token.logprob),
        "bytes": list(token.text),
    }


def _top(item: TokenLogprob) -> dict[str, float]:
    """The most likely tokens and the one that stands there, by text; of several that read alike
    the most likely."""
    top: dict[str, float] = {}
    for one in (*item.top, item.chosen):
        top.setdefault(token_text(one.text), _finite(one.logprob))
    return top


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)


def _text(items: Sequence[TokenLogprob]) -> str:
    """What tokens stand for together; prompt and output are decoded each by itself."""
    return b"".join(item.chosen.text for item in items).decode(errors="replace")


def _offsets(items: Sequence[TokenLogprob]) -> list[int]:
    """Where each token begins in their text: at the character that it is, or is a part of."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, length = [], 0
    for item in items:
        text, (pending, _) = item.chosen.text, decoder.getstate()
        # what does not go on with half a character makes a character of that half
        is_broken = bool(pending and text) and text[0] & 0xC0 != 0x80
        offsets.append(length + is_broken)
        length += len(decoder.decode(text))
    return offsets


def _first_token(text: str, prompt: str, output: str) -> str:
    """What the prompt's first token stands for in an echoed text, of which there is no record; the
    other tokens' texts are given. Nothing where it cannot be told, as with a mark without text."""
    most = prompt + output  # a stop may have cut the text
    for length in range(min(len(text), LONGEST_TOKEN) + 1):
        if text.startswith(prompt, length) and most.startswith(text[length:]):
            return text[:length]
    return ""

"""Log-probabilities in the shapes of OpenAI's answers."""

from __future__ import annotations

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
    following = [item for item in prompt if item is not None]
    known = [*following, *items]
    raw = [item.chosen.text for item in known]
    tokens: list[str] = [token_text(part) for part in raw]
    logprobs: list[float | None] = [_finite(item.chosen.logprob) for item in known]
    tops: list[dict[str, float] | None] = [_top(item) for item in known]
    first = _first_token(text, raw[: len(following)], raw[len(following) :]) if prompt else ""
    offsets = _offsets(raw, start=len(first), most=len(text))
    if prompt:
        tokens, logprobs, tops = [first, *tokens], [None, *logprobs], [None, *tops]
        offsets = [0, *offsets]
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
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


def _offsets(raw: Sequence[bytes], *, start: int, most: int) -> list[int]:
    """Where each token begins in the text: at the character that it is, or is a part of."""
    offsets = []
    for part in raw:
        is_inside = bool(part) and _continues(part[0])
        offsets.append(max(0, min(start - is_inside, most)))
        start += sum(not _continues(byte) for byte in part)
    return offsets


def _continues(byte: int) -> bool:
    """Whether a byte of UTF-8 is not the first of its character."""
    return byte & 0xC0 == 0x80


def _first_token(text: str, prompt: Sequence[bytes], output: Sequence[bytes]) -> str:
    """What the prompt's first token stands for in an echoed text, of which it has no record; the
    other tokens' bytes are given. Nothing where it cannot be told, as with a mark without text."""
    needed = b"".join(prompt).decode(errors="replace")
    most = b"".join([*prompt, *output]).decode(errors="replace")  # a stop may have cut the text
    for length in range(min(len(text), LONGEST_TOKEN) + 1):
        if text.startswith(needed, length) and most.startswith(text[length:]):
            return text[:length]
    return ""

"""Where an output ends within a round's tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def cut(
    tokens: Sequence[int], stop_ids: Collection[int], remaining: int
) -> tuple[list[int], str | None]:
    """Cut a round's tokens at the first stop token or at the limit, whichever comes first.

    Args:
        tokens: accepted tokens and the recovered or bonus one.
        stop_ids: token ids that end the output; the one that does is kept.
        remaining: how many tokens the job may still take, at least 1.

    Returns:
        the tokens to commit, and why the output ends there: "stop", "length", or None (it goes
        on). A stop token that is also the last allowed one is a "stop"; one beyond the limit is
        never seen.
    """
    allowed = tokens[:remaining]
    for index, token in enumerate(allowed):
        if token in stop_ids:
            return list(allowed[: index + 1]), "stop"
    return list(allowed), "length" if len(allowed) == remaining else None

"""Comparing two tokenizers' vocabularies. Imports neither torch nor transformers."""

from __future__ import annotations

__all__ = ["describe_difference", "first_difference"]


def first_difference(a: list[str], b: list[str]) -> tuple[int, str | None, str | None] | None:
    """First id at which two vocabularies differ, with both tokens; None if they are equal.

    A token is None where that vocabulary has ended.
    """
    for number in range(max(len(a), len(b))):
        left = a[number] if number < len(a) else None
        right = b[number] if number < len(b) else None
        if left != right:
            return number, left, right
    return None


def describe_difference(draft: list[str], target: list[str]) -> str:
    """A sentence with both sizes and the first difference; "" when the vocabularies are equal."""
    difference = first_difference(draft, target)
    if difference is None:
        return ""
    number, ours, theirs = difference
    return (
        f"draft and target tokenizers differ: the draft has {len(draft)} tokens, the target "
        f"{len(target)}; the first difference is id {number}: "
        f"{ours!r} in the draft, {theirs!r} in the target"
    )

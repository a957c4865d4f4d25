"""The sampling chain: from a model's logits to those whose softmax is the law of the next token.

The order, which is transformers' wherever it has the step:

1. logit_bias
2. repetition_penalty, over prompt, output and the drafted tokens before the row
3. frequency_penalty and presence_penalty, over output and drafted tokens
4. bad_words, whose beginning may stand anywhere, across committed and drafted tokens too
5. min_tokens
6. allowed_token_ids
7. structured output's mask
8. temperature, top_k, top_p, min_p, typical_p; none of them at temperature 0

Rows of jobs with different parameters go through it together. Every step takes only the rows that
ask for it; what a step needs to know of each row is put together as a few indices, and the work on
the vocabulary is one operation for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.speculative import ranking, truncation
from pilotfish_workers.speculative.sampler import Sampler

__all__ = ["ChainRow", "apply_chain", "law_of"]


with np.errstate(divide="ignore"):
    _BIAS_OF_BITS = np.log(
        np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
        dtype=np.float32,
    )
"""What the eight bits of a byte add to the logits of their tokens: a mask laid on by adding is
several times faster than one that chooses, whatever the bits are."""


@dataclass(frozen=True, slots=True, eq=False)
class ChainRow:
    """What a row of logits is for: the token after `drafted`.

    Attributes:
        drafted: this round's drafted tokens before the row.
        allowed: int32 `[ceil(V / 32)]`, the row of `Constraint.masks` after `drafted`.
    """

    sampler: Sampler
    drafted: Sequence[int] = ()
    allowed: NDArray[np.int32] | None = None


def apply_chain(logits: torch.Tensor, rows: Sequence[ChainRow]) -> torch.Tensor:
    """Logits after the whole chain.

    Token ids that the vocabulary lacks are passed over, in parameters as among tokens.

    Args:
        logits: `[R, V]`, any float type and device. They are not changed.
        rows: R of them. Those of one sampler are counted from its committed tokens of this moment.

    Returns:
        `[R, V]` on the same device, float64 where `logits` are, else float32. Where a token cannot
        come it holds −inf. The softmax of a row is the law of the next token; at temperature 0
        that is the argmax, and the row stands as it was before step 8. A row that wants nothing
        of the chain holds its logits as they were. The result may share `logits`' memory where no
        row does: do not write to it.

    Raises:
        ValueError: another number of rows than of logits, or a mask of another size.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits, but {len(rows)} to apply the chain to")
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    if all(_is_unchanged(row) for row in rows):
        return logits.detach().to(dtype)
    chain = logits.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
    _add_bias(chain, rows)
    _penalise(chain, rows)
    _forbid_tokens(chain, rows)
    _forbid_others(chain, rows)
    _sample(chain, rows)
    return chain


def law_of(chain: torch.Tensor) -> torch.Tensor:
    """float64 `[R, V]`: the probabilities after `apply_chain`; NaN in a row with no token left."""
    return torch.softmax(chain, -1, dtype=torch.float64)


def _is_unchanged(row: ChainRow) -> bool:
    return (
        row.allowed is None
        and not row.sampler.bad_words
        and not row.sampler.params.changes_logits
        and not _shapes_law(row.sampler.params)
    )


def _shapes_law(params: SamplingParams) -> bool:
    return params.temperature != 0 and not (
        params.temperature == params.top_p == params.typical_p == 1
        and params.top_k <= 0
        and params.min_p == 0
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Fixed:
    """What the chain needs of a sampler in every round, for one vocabulary size and device.

    Attributes:
        bias_ids: int64, on the device.
        bias: float64, on the device, one for each of them.
        allowed: int32 `[ceil(V / 32)]`, the bits of `params.allowed_token_ids`.
        bad_ids: tokens that are bad words by themselves.
        bad_ends: for the last but one token of each longer bad word, the tokens before its last
            one, and the last one.
        longest: tokens of the longest bad word but for the last.
    """

    bias_ids: torch.Tensor
    bias: torch.Tensor
    allowed: NDArray[np.int32]
    stop_ids: NDArray[np.int64]
    bad_ids: NDArray[np.int64]
    bad_ends: dict[int, list[tuple[list[int], int]]]
    longest: int


def _fixed_of(sampler: Sampler, chain: torch.Tensor) -> _Fixed:
    size, device = chain.shape[1], chain.device
    key = f"chain {size} {device}"
    if key not in sampler.scratch:
        sampler.scratch[key] = _build_fixed(sampler, size, device)
    fixed: _Fixed = sampler.scratch[key]
    return fixed


def _build_fixed(sampler: Sampler, size: int, device: torch.device) -> _Fixed:
    params = sampler.params
    bias = {token: value for token, value in params.logit_bias if token < size}
    # transformers does not take an end of the output for a bad word
    bad_ids = {word[0] for word in sampler.bad_words if len(word) == 1} - {*sampler.stop_ids}
    bad_ends: dict[int, list[tuple[list[int], int]]] = {}
    for word in {*sampler.bad_words}:
        if len(word) > 1 and word[-1] < size:
            bad_ends.setdefault(word[-2], []).append(([*word[:-1]], word[-1]))
    return _Fixed(
        bias_ids=torch.tensor([*bias], dtype=torch.int64, device=device),
        bias=torch.tensor([*bias.values()], dtype=torch.float64, device=device),
        allowed=_bits(_known(params.allowed_token_ids or (), size), size),
        stop_ids=_known(sampler.stop_ids, size),
        bad_ids=_known(bad_ids, size),
        bad_ends=bad_ends,
        longest=max((len(word) - 1 for word in sampler.bad_words), default=0),
    )


def _known(ids: Iterable[int], size: int) -> NDArray[np.int64]:
    return np.array(sorted({token for token in ids if token < size}), np.int64)


def _bits(ids: NDArray[np.int64], size: int) -> NDArray[np.int32]:
    is_set = np.zeros(_num_words(size) * 32, np.uint8)
    is_set[ids] = 1
    return np.packbits(is_set, bitorder="little").view("<i4").astype(np.int32)


def _num_words(size: int) -> int:
    return (size + 31) // 32


def _add_bias(chain: torch.Tensor, rows: Sequence[ChainRow]) -> None:
    at = [number for number, row in enumerate(rows) if row.sampler.params.logit_bias]
    if at:
        fixed = [_fixed_of(rows[number].sampler, chain) for number in at]
        sizes = [len(one.bias_ids) for one in fixed]
        starts = torch.from_numpy(np.repeat(np.array(at, np.int64) * chain.shape[1], sizes))
        places = torch.cat([one.bias_ids for one in fixed]) + starts.to(chain.device)
        chain.view(-1).index_add_(0, places, torch.cat([one.bias for one in fixed]).to(chain.dtype))


def _penalise(chain: torch.Tensor, rows: Sequence[ChainRow]) -> None:
    size = chain.shape[1]
    places: list[NDArray[np.int64]] = []
    numbers: list[NDArray[np.float64]] = []
    for number, row in enumerate(rows):
        params = row.sampler.params
        if not params.has_penalties:
            continue
        ids, counts = row.sampler.history.counts(row.drafted)
        is_meant = ids < size
        if params.repetition_penalty == 1:
            is_meant &= counts > 0
        ids, counts = ids[is_meant], counts[is_meant]
        places.append(ids + number * size)
        less = np.empty((3, len(ids)))
        less[0] = params.repetition_penalty
        less[1] = params.frequency_penalty * counts
        less[2] = params.presence_penalty * (counts > 0)
        numbers.append(less)
    if not places:
        return
    where = torch.from_numpy(np.concatenate(places)).to(chain.device)
    penalties = torch.from_numpy(np.concatenate(numbers, 1)).to(chain)
    repetition, frequency, presence = penalties
    flat = chain.view(-1)
    values = flat[where]
    values = torch.where(values < 0, values * repetition, values / repetition)
    flat[where] = values - frequency - presence


def _forbid_tokens(chain: torch.Tensor, rows: Sequence[ChainRow]) -> None:
    """Bad words, and what would end an output too early."""
    places: list[NDArray[np.int64]] = []
    for number, row in enumerate(rows):
        sampler = row.sampler
        if sampler.bad_words:
            places += [ids + number * chain.shape[1] for ids in _bad_tokens(row, chain)]
        if sampler.position + len(row.drafted) < sampler.params.min_tokens:
            places.append(_fixed_of(sampler, chain).stop_ids + number * chain.shape[1])
    if places:
        where = torch.from_numpy(np.concatenate(places)).to(chain.device)
        chain.view(-1).index_fill_(0, where, -math.inf)


def _bad_tokens(row: ChainRow, chain: torch.Tensor) -> list[NDArray[np.int64]]:
    """Those that would complete a bad word."""
    fixed = _fixed_of(row.sampler, chain)
    if not fixed.bad_ends:
        return [fixed.bad_ids]
    before = [*row.sampler.tokens[-fixed.longest :], *row.drafted]
    ends = [
        last
        for beginning, last in fixed.bad_ends.get(before[-1], ())
        if before[-len(beginning) :] == beginning
    ]
    return [fixed.bad_ids, np.array(ends, np.int64)]


def _forbid_others(chain: torch.Tensor, rows: Sequence[ChainRow]) -> None:
    """All tokens but those that are allowed, by the job and by its structure."""
    at: list[int] = []
    masks: list[NDArray[np.int32]] = []
    for number, row in enumerate(rows):
        mask = _mask_of(row, chain)
        if mask is not None:
            at.append(number)
            masks.append(mask)
    if at:
        bias = _bias_of(np.stack(masks), chain)
        ranking.on_rows(chain, at, lambda part: part.add_(bias))


def _mask_of(row: ChainRow, chain: torch.Tensor) -> NDArray[np.int32] | None:
    """The bits of the tokens that may come; None where all may."""
    if row.allowed is not None and row.allowed.shape != (_num_words(chain.shape[1]),):
        raise ValueError(f"a mask of shape {row.allowed.shape} for {chain.shape[1]} tokens")
    if row.sampler.params.allowed_token_ids is None:
        return row.allowed
    allowed = _fixed_of(row.sampler, chain).allowed
    return allowed if row.allowed is None else allowed & row.allowed


def _bias_of(words: NDArray[np.int32], chain: torch.Tensor) -> torch.Tensor:
    """float32 `[n, V]`: 0 where a bit of `[n, ceil(V / 32)]` words is set, else −inf; on the
    device of `chain`."""
    octets = words.astype("<i4", copy=False).view(np.uint8)
    if ranking.is_on_processor(chain):
        bias = torch.from_numpy(np.take(_BIAS_OF_BITS, octets, axis=0))
    else:  # an eighth of the bytes travels
        table = torch.from_numpy(_BIAS_OF_BITS).to(chain.device)
        bias = table[torch.from_numpy(octets).to(chain.device).long()]
    return bias.flatten(1)[:, : chain.shape[1]]


def _sample(chain: torch.Tensor, rows: Sequence[ChainRow]) -> None:
    """Temperature and what follows."""
    at = [number for number, row in enumerate(rows) if _shapes_law(row.sampler.params)]
    if at:
        params = [rows[number].sampler.params for number in at]
        ranking.on_rows(chain, at, lambda part: _shape_laws(part, params))


def _shape_laws(logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    size = logits.shape[1]
    if any(one.temperature != 1 for one in params):
        column = torch.tensor([[one.temperature] for one in params], dtype=logits.dtype)
        logits.div_(column.to(logits.device))
    top_k = [one.top_k if 0 < one.top_k < size else 0 for one in params]
    top_p = [one.top_p for one in params]
    min_p = [one.min_p for one in params]
    typical_p = [one.typical_p for one in params]
    is_cut = [k > 0 or share < 1 for k, share in zip(top_k, top_p, strict=True)]
    _keep(logits, is_cut, truncation.keep_most_likely, top_k, top_p)
    _keep(logits, [share > 0 for share in min_p], truncation.keep_relative, min_p)
    _keep(logits, [share < 1 for share in typical_p], truncation.keep_typical, typical_p)


def _keep(
    logits: torch.Tensor,
    is_meant: Sequence[bool],
    step: Callable[..., None],
    *parameters: Sequence[float],
) -> None:
    at = [row for row, it_is in enumerate(is_meant) if it_is]
    if at:
        chosen = [[values[row] for row in at] for values in parameters]
        ranking.on_rows(logits, at, lambda part: step(part, *chosen))

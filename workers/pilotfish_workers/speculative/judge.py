"""What a target's pass decides: every sequence by its own rule, all of them in few operations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

import torch

from pilotfish_workers.speculative.accept import (
    BAD_LOGITS,
    NOTHING_ALLOWED,
    Outcome,
    accept_greedy,
)
from pilotfish_workers.speculative.best import best_tokens, why_none
from pilotfish_workers.speculative.by_law import judge_by_law
from pilotfish_workers.speculative.chain import ChainRow, apply_chain
from pilotfish_workers.speculative.gumbel import gumbel_argmax
from pilotfish_workers.speculative.judged_rows import JudgedRows
from pilotfish_workers.speculative.logprobs import Scored, token_logprobs
from pilotfish_workers.speculative.near_ties import is_rounded, leads, resolutions
from pilotfish_workers.speculative.sampler import Case
from pilotfish_workers.speculative.target_laws import take_rows

__all__ = ["judge"]

log = logging.getLogger(__name__)


def judge(
    logits: torch.Tensor,
    best: Sequence[int],
    cases: Sequence[Case | None],
    counts: Sequence[int],
) -> list[Outcome | None]:
    """Judge every case by its sampler's rule.

    A row that is unusable, or whose chain leaves nothing, ends what is judged: if it is reached
    the outcome's token says so. It does no harm behind a rejected token. Where a constraint raises,
    nothing is allowed; the other cases are judged as ever.

    Args:
        logits: `[M, V]`, any float type; they stay as they are.
        best: M tokens, `best_tokens(logits)`.
        cases: what to judge, each on its rows.
        counts: how many rows each has, one after the other; M in all.

    Raises:
        ValueError: rows and cases do not fit together.
    """
    if not sum(counts) == len(best) == logits.shape[0]:
        raise ValueError(f"{sum(counts)} rows wanted, {logits.shape[0]} there, {len(best)} best")
    parts = JudgedRows.split(cases, counts)
    chained, plain = [], []
    for part in parts:
        if part is None:
            continue
        if BAD_LOGITS in best[part.start : part.judged]:
            part.outcome = Outcome(0, BAD_LOGITS)
        elif part.needs_chain:
            chained.append(part)
        elif part.case.is_judged:
            targets = best[part.judged : part.judged + part.num_rows]
            part.outcome = accept_greedy(part.case.drafted, targets)
            plain.append(part)
    if is_rounded(logits):
        _look_at_leads(logits, [(part.judged, part) for part in plain])
    if chained:
        _judge_chained(logits, best, chained)
    mine = [part for part in parts if part is not None]
    if is_rounded(logits):
        _add_near_ties(logits, mine)
    _add_logprobs(logits, mine)
    return [None if part is None else part.outcome for part in parts]


def _judge_chained(logits: torch.Tensor, best: Sequence[int], parts: Sequence[JudgedRows]) -> None:
    """Decide where the chain has a say; one call of it for all rows."""
    rows: list[int] = []
    chain_rows: list[ChainRow] = []
    for part in parts:
        _keep_usable(part, best, logits.shape[1])
        chain_rows += _chain_rows(part)
        part.place = len(rows)
        rows += range(part.judged, part.judged + part.num_rows)
    if not rows:
        for part in parts:
            part.outcome = Outcome(0, part.ending)
        return
    chained = apply_chain(take_rows(logits, rows), chain_rows)
    tokens = best_tokens(chained)
    by_law, greedy = [], []
    for part in parts:
        mine = tokens[part.place : part.place + part.num_rows]
        if BAD_LOGITS in mine:
            index = mine.index(BAD_LOGITS)
            part.end_at(index, why_none(chained[part.place + index]))
        rule = part.case.sampler.rule
        if rule == "greedy":
            part.outcome = _follow(part, mine.__getitem__)
            greedy.append(part)
        elif rule == "coupled":
            part.outcome = _follow(part, _coupled(part, chained))
        else:
            by_law.append(part)
    if is_rounded(logits):
        _look_at_leads(chained, [(part.place, part) for part in greedy])
    if by_law:
        judge_by_law(chained, by_law)


def _keep_usable(part: JudgedRows, best: Sequence[int], vocab_size: int) -> None:
    mine = best[part.judged : part.judged + part.num_rows]
    if BAD_LOGITS in mine:
        part.end_at(mine.index(BAD_LOGITS), BAD_LOGITS)
    for index, token in enumerate(part.drafted):
        if token >= vocab_size:
            # it is judged, and cannot be accepted: its own row is as good as none
            part.end_at(index + 1, NOTHING_ALLOWED)


def _chain_rows(part: JudgedRows) -> list[ChainRow]:
    drafted = tuple(part.case.drafted[: max(0, part.num_rows - 1)])
    sampler = part.case.sampler
    masks = None
    try:
        if part.num_rows:
            masks = sampler.masks(drafted)
    except Exception:  # a library follows the grammar; whatever it meets must end no other job
        log.exception("a grammar cannot be followed")
        part.end_at(0, NOTHING_ALLOWED)
    return [
        ChainRow(sampler, drafted[:index], None if masks is None else masks[index])
        for index in range(part.num_rows)
    ]


def _follow(part: JudgedRows, choose: Callable[[int], int]) -> Outcome:
    """Accept drafted tokens for as long as they are what the target chooses after those before."""
    drafted = part.drafted
    for index in range(part.num_rows):
        token = choose(index)
        if index == len(drafted) or drafted[index] != token:
            return Outcome(index, token)
    return Outcome(part.num_rows, part.ending)


def _coupled(part: JudgedRows, chained: torch.Tensor) -> Callable[[int], int]:
    sampler, base = part.case.sampler, part.case.sampler.position

    def choose(index: int) -> int:
        token, lead = gumbel_argmax(chained[part.place + index], sampler.coins, base + index)
        part.leads.append(lead)
        return token

    return choose


def _num_emitted(part: JudgedRows) -> int:
    return part.outcome.num_accepted + (part.outcome.token >= 0)


def _look_at_leads(scores: torch.Tensor, parts: Sequence[tuple[int, JudgedRows]]) -> None:
    """Fill in `leads` of greedy parts, each with the row of its first emitted token."""
    rows = [row for start, part in parts for row in range(start, start + _num_emitted(part))]
    if rows:
        found = iter(leads(take_rows(scores, rows)))
        for _, part in parts:
            part.leads = [next(found) for _ in range(_num_emitted(part))]


def _add_near_ties(logits: torch.Tensor, parts: Sequence[JudgedRows]) -> None:
    """Note the emitted tokens that were chosen narrowly, where `leads` were looked at."""
    mine = [part for part in parts if part.leads and _num_emitted(part)]
    rows: list[int] = []
    tokens: list[int] = []
    for part in mine:
        emitted = part.outcome.tokens(part.case.drafted)[: _num_emitted(part)]
        rows += range(part.judged, part.judged + len(emitted))
        tokens += emitted
    steps = iter(resolutions(logits, rows, tokens) if rows else ())
    for part in mine:
        heat = part.case.sampler.params.temperature or 1.0  # leads are of logits divided by it
        near = [
            index
            for index, step in enumerate(islice(steps, _num_emitted(part)))
            if part.leads[index] * heat <= step
        ]
        part.outcome = replace(part.outcome, near_ties=tuple(near))


def _add_logprobs(logits: torch.Tensor, parts: Sequence[JudgedRows]) -> None:
    wanted: list[Scored] = []
    spans = []
    for part in parts:
        prompt, output = _prompt_tokens(part), _output_tokens(part)
        if prompt or output:
            start = len(wanted)
            wanted += prompt + output
            spans.append((part, start, start + len(prompt), len(wanted)))
    found = token_logprobs(logits, wanted)
    for part, start, middle, end in spans:
        part.outcome = replace(
            part.outcome,
            scored=found[start:middle] if middle > start else None,
            logprobs=found[middle:end] if end > middle else None,
        )


def _prompt_tokens(part: JudgedRows) -> list[Scored]:
    num_top = part.case.sampler.params.prompt_logprobs or 0
    return [Scored(row, token, num_top) for row, token in enumerate(part.case.scored, part.start)]


def _output_tokens(part: JudgedRows) -> list[Scored]:
    num_top = part.case.sampler.params.logprobs
    if num_top is None:
        return []
    tokens = part.outcome.tokens(part.case.drafted)
    return [
        Scored(row, token, num_top) for row, token in enumerate(tokens, part.judged) if token >= 0
    ]

"""The faults that `mutation_check` plants, and the tests that have to see them.

Each is a slip that one could make in the rules, the chain, the coins, the laws, the stops, a
drafter's q or on the verify side. Code with it runs as before and gives tokens that look right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True, slots=True)
class Fault:
    """A slip in one place.

    Attributes:
        name: what is wrong with it.
        file: path from the repository's root.
        old: text that stands in the file exactly once.
        new: what stands there instead.
        tests: node ids for pytest; at least one of them has to fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def module(self) -> str:
        """The dotted name of what is changed."""
        return ".".join(PurePosixPath(self.file).with_suffix("").parts[1:])


_WORKERS = "workers/pilotfish_workers"
_SPECULATIVE = f"{_WORKERS}/speculative"

_RULES = "tests/unit/test_speculative_rules.py"
_EXACT_LAW = "tests/unit/test_speculative_exact_law.py"
_JUDGE = "tests/unit/test_speculative_judge.py"
_COINS = "tests/unit/test_speculative_coins.py"
_CHAIN = "tests/unit/test_speculative_chain.py"
_DRAW = "tests/unit/test_speculative_draw.py"
_LAW = "tests/unit/test_speculative_law.py"
_ACCEPT = "tests/unit/test_speculative_accept.py"
_HISTORY = "tests/unit/test_speculative_history.py"
_STOPS = "tests/unit/test_speculative_stops.py"
_TEXT = "tests/unit/test_verify_output_text.py"
_PROPOSED = "tests/unit/test_verify_proposed_laws.py"
_BY_LAW = "tests/unit/test_speculative_by_law.py"
_SETTLING = "tests/unit/test_verify_settling.py"
_SCHEDULER = "tests/unit/test_verify_scheduler.py"
_DRAFT_SESSION = "tests/unit/test_draft_session.py"
_DRAFT_SAMPLING = "tests/unit/test_draft_sampling.py"
_RUNNER = "tests/unit/test_model_runner_sampling.py"
_GRAMMAR = "tests/unit/test_model_grammar.py"

_ROUND = f"{_RULES}::test_the_law_of_a_round_is_the_targets"
_DEFINED = f"{_BY_LAW}::test_a_round_is_decided_as_its_definition_says"
_GREEDY = f"{_JUDGE}::test_greedy_with_a_chain_takes_the_argmax_of_what_the_chain_leaves"
_STEP = f"{_CHAIN}::test_a_step_does_what_it_says"
_REPORTED = f"{_DRAW}::test_the_reported_law_is_the_drafters_after_the_whole_chain"
_FROM_REPORTED = f"{_DRAW}::test_tokens_come_from_the_reported_law_cut_down_to_its_likeliest"
_COUPLED = (
    f"{_JUDGE}::test_the_coupled_rule_gives_the_same_tokens_whatever_is_drafted_and_beside_whom"
)
_SCORES = f"{_JUDGE}::test_each_emitted_token_has_its_log_probability_by_the_models_own_logits"
_ANY_ROUNDS = f"{_TEXT}::test_any_rounds_and_crashes_give_what_a_look_after_each_token_gives"


def faults() -> Iterator[Fault]:
    """All of them, by where they are."""
    yield from _in_rules()
    yield from _in_judging_by_law()
    yield from _in_judging()
    yield from _in_coins()
    yield from _in_penalties()
    yield from _in_chain()
    yield from _in_truncation()
    yield from _in_drafting()
    yield from _in_stops()
    yield from _in_verifying()


def _in_rules() -> Iterator[Fault]:
    file = f"{_SPECULATIVE}/rules.py"
    yield Fault(
        "rejection: the ratio upside down",
        file,
        "if coin(index) * theirs >= ours:",
        "if coin(index) * ours >= theirs:",
        (_ROUND,),
    )
    yield Fault(
        "rejection: q is not looked at",
        file,
        "if coin(index) * theirs >= ours:",
        "if coin(index) >= ours:",
        (_ROUND,),
    )
    yield Fault(
        "rejection: no residual",
        file,
        "return Verdict(index, 1.0)",
        "return Verdict(index, None)",
        (_ROUND,),
    )
    yield Fault(
        "rejection: a token that cannot come is cut instead of rejected",
        file,
        "return Verdict(index, 1.0)",
        "return Verdict(index, 1.0 if ours else None)",
        (_ROUND,),
    )
    yield Fault(
        "block: the first prefix that passes instead of the last",
        file,
        "        if passes:\n",
        "        if passes and not length:\n",
        (_ROUND,),
    )
    yield Fault(
        "block: no prefix behind one that fails",
        file,
        "            length, scale = index + 1, weight\n",
        "            length, scale = index + 1, weight\n        else:\n            break\n",
        (_ROUND,),
    )
    yield Fault(
        "block: the residual without the scale",
        file,
        "return Verdict(length, None if length == len(p) else scale)",
        "return Verdict(length, None if length == len(p) else 1.0)",
        (_ROUND,),
    )
    yield Fault(
        "block: the scale of the last prefix that was tested",
        file,
        "length, scale = index + 1, weight",
        "length = index + 1\n        scale = weight",
        (_ROUND,),
    )
    yield Fault(
        "block: a token's weight forgets those before it",
        file,
        "weight = 1.0 if weight * ours >= theirs else weight * ours / theirs",
        "weight = 1.0 if ours >= theirs else ours / theirs",
        (_ROUND,),
    )
    yield Fault(
        "block: a weight above 1",
        file,
        "weight = 1.0 if weight * ours >= theirs else weight * ours / theirs",
        "weight = weight * ours / theirs",
        (_ROUND,),
    )
    yield Fault(
        "block: the laws before a token instead of those behind it",
        file,
        "_spare(weight, p_support[index + 1], q_support[index + 1])",
        "_spare(weight, p_support[index], q_support[index])",
        (_ROUND,),
    )
    yield Fault(
        "block: tokens that q does not have are no residual",
        file,
        "return weight * outside + float(",
        "return float(",
        (_ROUND,),
    )
    yield Fault(
        "block: the last prefix is judged like the others",
        file,
        "passes = coin(index) < weight",
        "passes = coin(index) * (2 - weight) < weight",
        (_ROUND,),
    )


def _in_judging_by_law() -> Iterator[Fault]:
    file = f"{_SPECULATIVE}/by_law.py"
    yield Fault(
        "the row behind a drafted token judges it",
        file,
        "places = np.arange(part.place, part.place + len(drafted))",
        "places = np.arange(part.place, part.place + len(drafted)) + 1",
        (_DEFINED,),
    )
    yield Fault(
        "block: q's tokens are looked up in the row before",
        file,
        "for law, at in zip(q[1:], places[1:], strict=True)]",
        "for law, at in zip(q[1:], places[:-1], strict=True)]",
        (_DEFINED,),
    )
    yield Fault(
        "the coin of acceptance is keyed by position alone",
        file,
        "return sampler.coins.accept(base + index, base)",
        "return sampler.coins.accept(base + index, 0)",
        (_DEFINED,),
    )
    yield Fault(
        "the coin of acceptance is keyed by base alone",
        file,
        "return sampler.coins.accept(base + index, base)",
        "return sampler.coins.accept(base, base)",
        (_DEFINED,),
    )
    yield Fault(
        "the coin that the token was drawn with decides about it",
        file,
        "return sampler.coins.accept(base + index, base)",
        "return sampler.coins.draft(base + index, base)",
        (_DEFINED,),
    )
    yield Fault(
        "the drawn token's coin is keyed by base",
        file,
        "uniform = sampler.coins.token(sampler.position + index)",
        "uniform = sampler.coins.token(sampler.position)",
        (f"{_BY_LAW}::test_the_token_behind_accepted_drafts_belongs_to_its_position",),
    )
    yield Fault(
        "the bonus is drawn from the row before",
        file,
        "return Wanted(part.place + index, uniform)",
        "return Wanted(part.place + max(0, index - 1), uniform)",
        (_DEFINED,),
    )
    yield Fault(
        "the residual of the row before",
        file,
        "return Wanted(part.place + index, uniform, verdict.scale, less)",
        "return Wanted(part.place + max(0, index - 1), uniform, verdict.scale, less)",
        (_DEFINED,),
    )
    yield Fault(
        "the residual without q",
        file,
        "return Wanted(part.place + index, uniform, verdict.scale, less)",
        "return Wanted(part.place + index, uniform)",
        (_DEFINED,),
    )
    yield Fault(
        "the residual with q of the row before",
        file,
        "if laws is None else laws[index]",
        "if laws is None else laws[max(0, index - 1)]",
        (_DEFINED,),
    )
    yield Fault(
        "a certain token that was rejected may come again",
        file,
        "less = SparseLaw.certain(drafted[index]) if laws is None else laws[index]",
        "less = None if laws is None else laws[index]",
        (f"{_BY_LAW}::test_tokens_without_laws_are_judged_as_certain",),
    )
    yield Fault(
        "a certain token counts as drawn from even odds",
        file,
        "q = [SparseLaw.certain(t) for t in drafted] if known is None",
        "q = [SparseLaw(np.array([t, t + 1]), np.ones(2, np.float32)) for t in drafted]"
        " if known is None",
        (f"{_BY_LAW}::test_tokens_without_laws_are_judged_as_certain",),
    )
    file = f"{_SPECULATIVE}/target_laws.py"
    yield Fault(
        "the draw of a residual without the scale",
        file,
        "values.append(one.less.probabilities[is_known] / one.scale)",
        "values.append(one.less.probabilities[is_known])",
        (_DEFINED,),
    )
    yield Fault(
        "the draw of a residual by q's weights",
        file,
        "values.append(one.less.probabilities[is_known] / one.scale)",
        "values.append(one.less.weights[is_known].astype(np.float64) / one.scale)",
        (_DEFINED,),
    )
    yield Fault(
        "p without its normaliser",
        file,
        ".double() / self._totals[where]",
        ".double()",
        (_DEFINED,),
    )
    yield Fault(
        "q without its normaliser",
        f"{_SPECULATIVE}/law.py",
        "return float(self.weights[self.ids == token].sum() / self.weights.sum(dtype=np.float64))",
        "return float(self.weights[self.ids == token].sum())",
        (f"{_LAW}::test_probabilities_are_those_of_the_weights",),
    )


def _in_judging() -> Iterator[Fault]:
    file = f"{_SPECULATIVE}/judge.py"
    yield Fault(
        "p before the chain",
        file,
        "chained = apply_chain(take_rows(logits, rows), chain_rows)",
        "chained = take_rows(logits, rows).float()",
        (_DEFINED,),
    )
    yield Fault(
        "the chain does not see drafted tokens",
        file,
        "ChainRow(sampler, drafted[:index], None if masks is None else masks[index])",
        "ChainRow(sampler, (), None if masks is None else masks[index])",
        (_GREEDY,),
    )
    yield Fault(
        "the chain counts the token that it judges",
        file,
        "ChainRow(sampler, drafted[:index], None if",
        "ChainRow(sampler, drafted[: index + 1], None if",
        (_GREEDY,),
    )
    yield Fault(
        "a grammar masks the first row alone",
        file,
        "None if masks is None else masks[index])",
        "None if masks is None or index else masks[index])",
        (f"{_EXACT_LAW}::test_a_constraint_holds_in_every_row[block-False]",),
    )
    yield Fault(
        "a grammar's first mask in every row",
        file,
        "None if masks is None else masks[index])",
        "None if masks is None else masks[0])",
        (f"{_EXACT_LAW}::test_a_constraint_holds_in_every_row[block-False]",),
    )
    yield Fault(
        "a token that the target lacks has no row",
        file,
        "part.end_at(index + 1, NOTHING_ALLOWED)",
        "part.end_at(index, NOTHING_ALLOWED)",
        (f"{_JUDGE}::test_a_token_that_the_target_lacks_is_rejected",),
    )
    yield Fault(
        "coupled: noise keyed by base",
        file,
        "sampler.coins, base + index)",
        "sampler.coins, base)",
        (_COUPLED,),
    )
    yield Fault(
        "coupled: noise keyed by position and base",
        file,
        "sampler.coins, base + index)",
        "sampler.coins, (base << 32) + base + index)",
        (_COUPLED,),
    )
    yield Fault(
        "coupled: the row before draws",
        file,
        "gumbel_argmax(chained[part.place + index]",
        "gumbel_argmax(chained[part.place + max(0, index - 1)]",
        (_COUPLED,),
    )
    yield Fault(
        "coupled: noise of exponential instead of Gumbel variables",
        f"{_SPECULATIVE}/gumbel.py",
        "noise.to(logits.device).log_().neg_().log_()",
        "noise.to(logits.device).log_().neg_()",
        (f"{_DRAW}::test_the_gumbel_maximum_has_the_law_of_the_logits",),
    )
    yield Fault(
        "log-probabilities of the row before",
        file,
        "for row, token in enumerate(tokens, part.judged) if token >= 0",
        "for row, token in enumerate(tokens, max(0, part.judged - 1)) if token >= 0",
        (
            _SCORES,
            f"{_JUDGE}::test_prompt_and_output_are_scored_together_with_numbers_of_their_own",
        ),
    )
    yield Fault(
        "prompt log-probabilities of the row behind",
        file,
        "enumerate(part.case.scored, part.start)]",
        "enumerate(part.case.scored, min(part.start + 1, part.judged))]",
        (f"{_JUDGE}::test_prompt_tokens_are_scored_also_in_a_chunk_that_is_not_the_last",),
    )
    file = f"{_SPECULATIVE}/accept.py"
    yield Fault(
        "greedy: the row behind a drafted token judges it",
        file,
        "drafted[kept] == targets[kept]:",
        "drafted[kept] == targets[kept + 1]:",
        (_ACCEPT,),
    )
    yield Fault(
        "greedy: the bonus of the row before",
        file,
        "return Outcome(num_accepted=kept, token=targets[kept])",
        "return Outcome(num_accepted=kept, token=targets[max(0, kept - 1)])",
        (_ACCEPT,),
    )


def _in_coins() -> Iterator[Fault]:
    file = f"{_SPECULATIVE}/coins.py"
    yield Fault(
        "the sample is not in the key",
        file,
        "key = np.array([seed % _WORD, sample % _WORD], dtype=np.uint64)",
        "key = np.array([seed % _WORD, 0], dtype=np.uint64)",
        (f"{_COINS}::test_no_two_purposes_positions_bases_samples_or_seeds_share_a_coin",),
    )
    yield Fault(
        "drafts are drawn with the coins of acceptance",
        file,
        "self._uniform(Purpose.DRAFT, position, base)",
        "self._uniform(Purpose.ACCEPT, position, base)",
        (f"{_COINS}::test_no_two_purposes_positions_bases_samples_or_seeds_share_a_coin",),
    )
    yield Fault(
        "a drafter's coins are keyed by position alone",
        file,
        "self._uniform(Purpose.DRAFT, position, base)",
        "self._uniform(Purpose.DRAFT, position, 0)",
        (f"{_COINS}::test_no_two_purposes_positions_bases_samples_or_seeds_share_a_coin",),
    )
    yield Fault(
        "the same noise at every position",
        file,
        "self._turn_to(Purpose.TOKEN, position, 0)",
        "self._turn_to(Purpose.TOKEN, 0, 0)",
        (f"{_COINS}::test_noise_is_the_same_stream_word_by_word",),
    )
    yield Fault(
        "a job without a seed has everybody's coins",
        file,
        "hashlib.sha256(job.encode())",
        'hashlib.sha256(b"job")',
        (f"{_COINS}::test_a_job_with_a_seed_has_its_coins_and_one_without_those_of_its_id",),
    )
    yield Fault(
        "all samples of a job draw alike",
        f"{_WORKERS}/sampling.py",
        "coins=Coins.of_job(job, params.seed, sample)",
        "coins=Coins.of_job(job, params.seed, 0)",
        (f"{_DRAFT_SAMPLING}::test_jobs_and_samples_have_coins_of_their_own",),
    )


def _in_penalties() -> Iterator[Fault]:
    file = f"{_SPECULATIVE}/chain.py"
    yield Fault(
        "penalties do not count drafted tokens",
        file,
        "row.sampler.history.counts(row.drafted)",
        "row.sampler.history.counts(())",
        (_STEP,),
    )
    yield Fault(
        "the frequency penalty counts the prompt",
        f"{_SPECULATIVE}/history.py",
        "if position >= self.num_prompt:",
        "if position >= 0:",
        (f"{_HISTORY}::test_a_prompts_token_counts_only_once_it_stands_in_the_output",),
    )
    yield Fault(
        "the repetition penalty forgets the prompt",
        file,
        "        if params.repetition_penalty == 1:\n            is_meant &= counts > 0",
        "        is_meant &= counts > 0",
        (_STEP,),
    )
    yield Fault(
        "the repetition penalty makes negative logits likelier",
        file,
        "torch.where(values < 0, values * repetition, values / repetition)",
        "values / repetition",
        (_STEP,),
    )
    yield Fault(
        "the presence penalty counts each time",
        file,
        "params.presence_penalty * (counts > 0)",
        "params.presence_penalty * counts",
        (_STEP,),
    )
    yield Fault(
        "frequency and presence before repetition",
        file,
        "values = torch.where(values < 0, values * repetition, values / repetition)\n"
        "    flat[where] = values - frequency - presence",
        "values = values - frequency - presence\n"
        "    flat[where] = torch.where(values < 0, values * repetition, values / repetition)",
        (_STEP,),
    )
    yield Fault(
        "bias after the penalties",
        file,
        "    _add_bias(chain, rows)\n    _penalise(chain, rows)\n",
        "    _penalise(chain, rows)\n    _add_bias(chain, rows)\n",
        (_STEP,),
    )


def _in_chain() -> Iterator[Fault]:
    file = f"{_SPECULATIVE}/chain.py"
    yield Fault(
        "min_tokens holds in the first row alone",
        file,
        "if sampler.position + len(row.drafted) < sampler.params.min_tokens:",
        "if not row.drafted and sampler.position < sampler.params.min_tokens:",
        (_STEP,),
    )
    yield Fault(
        "min_tokens does not count drafted tokens",
        file,
        "if sampler.position + len(row.drafted) < sampler.params.min_tokens:",
        "if sampler.position < sampler.params.min_tokens:",
        (_STEP,),
    )
    yield Fault(
        "min_tokens holds a token too long",
        file,
        "if sampler.position + len(row.drafted) < sampler.params.min_tokens:",
        "if sampler.position + len(row.drafted) <= sampler.params.min_tokens:",
        (_STEP,),
    )
    yield Fault(
        "bad words are not looked for over drafted tokens",
        file,
        "before = [*row.sampler.tokens[-fixed.longest :], *row.drafted]",
        "before = [*row.sampler.tokens[-fixed.longest :]]",
        (_STEP,),
    )
    yield Fault(
        "bad words are not looked for over committed tokens",
        file,
        "before = [*row.sampler.tokens[-fixed.longest :], *row.drafted]",
        "before = [*row.drafted] or [*row.sampler.tokens[-fixed.longest :]]",
        (_STEP,),
    )
    yield Fault(
        "temperature after the cuts",
        file,
        "        logits.div_(column.to(logits.device))\n",
        "        from dataclasses import replace\n\n"
        "        _shape_laws(logits, [replace(one, temperature=1.0) for one in params])\n"
        "        logits.div_(column.to(logits.device))\n"
        "        return\n",
        (_STEP, f"{_CHAIN}::test_any_parameters_give_the_law_of_transformers_processors"),
    )
    yield Fault(
        "top_p before top_k",
        file,
        "    _keep(logits, is_cut, truncation.keep_most_likely, top_k, top_p)\n",
        "    for ks, shares in (([0] * len(top_k), top_p), (top_k, [1.0] * len(top_p))):\n"
        "        is_cut = [k > 0 or share < 1 for k, share in zip(ks, shares, strict=True)]\n"
        "        _keep(logits, is_cut, truncation.keep_most_likely, ks, shares)\n",
        (f"{_CHAIN}::test_top_p_counts_among_what_top_k_kept",),
    )
    yield Fault(
        "min_p before top_p",
        file,
        "    _keep(logits, is_cut, truncation.keep_most_likely, top_k, top_p)\n"
        "    _keep(logits, [share > 0 for share in min_p], truncation.keep_relative, min_p)\n",
        "    _keep(logits, [share > 0 for share in min_p], truncation.keep_relative, min_p)\n"
        "    _keep(logits, is_cut, truncation.keep_most_likely, top_k, top_p)\n",
        (f"{_CHAIN}::test_any_parameters_give_the_law_of_transformers_processors",),
    )


def _in_truncation() -> Iterator[Fault]:
    file = f"{_SPECULATIVE}/truncation.py"
    yield Fault(
        "ties of top_k are dropped",
        file,
        "            return Cut(kth)\n",
        '            above = size - int(np.searchsorted(values[::-1], kth, side="right"))\n'
        "            return Cut(kth, max(1, top_k - above))\n",
        (f"{_CHAIN}::test_all_that_tie_with_the_kth_stay",),
    )
    yield Fault(
        "ties of top_p all stay",
        file,
        "return Cut(floor, count - num_above)",
        "return Cut(floor)",
        (f"{_CHAIN}::test_of_ties_at_top_ps_cut_the_highest_ids_stay",),
    )
    yield Fault(
        "top_p leaves out the token that reaches it",
        file,
        "count = min(int(np.searchsorted(reached, share)) + 1, likely)",
        "count = min(max(1, int(np.searchsorted(reached, share))), likely)",
        (f"{_CHAIN}::test_top_p_counts_among_what_top_k_kept",),
    )
    yield Fault(
        "min_p relative to 1 instead of the likeliest token",
        file,
        "logits.amax(-1, keepdim=True) + below.to(logits.device)",
        "logits.logsumexp(-1, keepdim=True) + below.to(logits.device)",
        (_STEP,),
    )
    yield Fault(
        "typical_p keeps the likeliest",
        file,
        "nearness = logprobs.add_(entropy).abs_().neg_()",
        "nearness = logprobs.add_(entropy)",
        (f"{_CHAIN}::test_any_parameters_give_the_law_of_transformers_processors",),
    )


def _in_drafting() -> Iterator[Fault]:
    file = f"{_SPECULATIVE}/draw.py"
    yield Fault(
        "q before the filters",
        file,
        "drawn[place] = _draw_from(law, mine[place])",
        "drawn[place] = Drawn(\n"
        "                _draw_from(law, mine[place]).token,\n"
        "                _likeliest(logits[rows[place]][None])[0],\n"
        "            )",
        (_REPORTED,),
    )
    yield Fault(
        "q is cut behind the token that was drawn",
        file,
        "return Drawn(law.draw(sampler.coins.draft(base + len(one.drafted), base)), law)",
        "token = law.draw(sampler.coins.draft(base + len(one.drafted), base))\n"
        "    end = 1 + int(np.flatnonzero(law.ids == token)[0])\n"
        "    return Drawn(token, SparseLaw(law.ids[:end], law.weights[:end]))",
        (_FROM_REPORTED,),
    )
    yield Fault(
        "q is cut after the draw",
        file,
        "logits, ids = chained.topk(min(NUM_ENTRIES, chained.shape[1]), dim=-1)",
        "logits, ids = chained.topk(min(2 * NUM_ENTRIES, chained.shape[1]), dim=-1)",
        (_FROM_REPORTED,),
    )
    yield Fault(
        "all drafts of a round with one coin",
        file,
        "sampler.coins.draft(base + len(one.drafted), base)",
        "sampler.coins.draft(base, base)",
        (f"{_DRAW}::test_a_draw_belongs_to_seed_position_and_base",),
    )
    yield Fault(
        "a drafter's chain does not see its drafts",
        file,
        "return ChainRow(one.sampler, tuple(one.drafted), None if masks is None else masks[-1])",
        "return ChainRow(one.sampler, (), None if masks is None else masks[-1])",
        (_REPORTED,),
    )
    yield Fault(
        "a drafter's mask is that of the round's beginning",
        file,
        "None if masks is None else masks[-1])",
        "None if masks is None else masks[0])",
        (f"{_DRAW}::test_a_constraint_is_followed_before_a_token_is_drawn",),
    )
    yield Fault(
        "coupled: a drafter draws with the next position's noise",
        file,
        "sampler, position = one.sampler, one.sampler.position + len(one.drafted)",
        "sampler, position = one.sampler, one.sampler.position + len(one.drafted) + 1",
        (f"{_DRAW}::test_coupled_draws_what_the_target_would_draw_of_the_same_logits",),
    )
    yield Fault(
        "a drafter's counts outlive the tokens that a Sync takes back",
        f"{_WORKERS}/draft/session.py",
        "            self.draft.sampler.rewind()\n",
        "            pass\n",
        (_DRAFT_SESSION,),
    )
    yield Fault(
        "laws travel in the wrong order",
        f"{_WORKERS}/draft/session.py",
        "[law.to_bytes() for law in drafted.laws]",
        "[law.to_bytes() for law in drafted.laws[::-1]]",
        (f"{_DRAFT_SESSION}::test_a_proposal_carries_the_law_of_each_token",),
    )


def _in_stops() -> Iterator[Fault]:
    file = f"{_WORKERS}/verify/output_text.py"
    yield Fault(
        "a stop string is not found over two rounds",
        file,
        '        before, self._prefix = self._prefix, ""\n        if self._strings',
        '        before, self._prefix = self._prefix, ""\n        self._state = 0\n'
        "        if self._strings",
        (_ANY_ROUNDS,),
    )
    yield Fault(
        "the text keeps the stop string",
        file,
        "return text[: end if self._include_stop else end - length]",
        "return text[:end]",
        (_ANY_ROUNDS,),
    )
    yield Fault(
        "what may become a stop string is shown at once",
        file,
        "begin = len(text) - strings.num_open(self._state)",
        "begin = len(text)",
        (_ANY_ROUNDS,),
    )
    yield Fault(
        "a stop string counts before min_tokens",
        file,
        "is_searched = self._num_tokens >= self._min_tokens",
        "is_searched = True",
        (f"{_TEXT}::test_a_stop_string_complete_too_early_is_passed_over_and_the_next_one_counts",),
    )
    yield Fault(
        "after a crash a stop string that had begun is forgotten",
        file,
        "self._take(self._strings, self._detokenizer.push(output), False)",
        "self._detokenizer.push(output)",
        (_ANY_ROUNDS,),
    )
    yield Fault(
        "after a crash min_tokens is counted anew",
        file,
        "self._num_tokens = len(output)",
        "self._num_tokens = 0",
        (_ANY_ROUNDS,),
    )
    file = f"{_SPECULATIVE}/stops.py"
    yield Fault(
        "a shorter stop string that ends inside a longer one is overlooked",
        file,
        "self._found[state] = self._found[state] or self._found[fail]",
        "self._found[state] = self._found[state]",
        (f"{_STOPS}::test_the_first_complete_string_is_found_and_the_longest_of_those",),
    )
    yield Fault(
        "a stop token is not kept",
        file,
        'return list(allowed[: index + 1]), "stop"',
        'return list(allowed[:index]), "stop"',
        (f"{_STOPS}::test_a_round_is_cut_where_the_output_ends",),
    )
    yield Fault(
        "a stop token beyond the limit is seen",
        file,
        "for index, token in enumerate(allowed):",
        "for index, token in enumerate(tokens):",
        (f"{_STOPS}::test_a_round_is_cut_where_the_output_ends",),
    )


def _in_verifying() -> Iterator[Fault]:
    file = f"{_WORKERS}/verify/settling.py"
    yield Fault(
        "the laws of drafted tokens are lost on the way",
        file,
        "laws=None if laws is None else laws[: len(work.drafted)],",
        "laws=None,",
        (f"{_SETTLING}::test_a_case_has_the_laws_of_the_tokens_that_it_judges",),
    )
    yield Fault(
        "tokens behind a stop string are kept",
        file,
        'tokens, reason = tokens[: pushed.num_tokens], "stop"',
        'reason = "stop"',
        (f"{_SETTLING}::test_text_tokens_and_log_probabilities_end_together",),
    )
    yield Fault(
        "a stop token has a text",
        file,
        "shown = tokens[:-1] if tokens[-1] < 0 or _is_stop(sequence, tokens, reason) else tokens",
        "shown = tokens[:-1] if tokens[-1] < 0 else tokens",
        (f"{_SETTLING}::test_text_tokens_and_log_probabilities_end_together",),
    )
    yield Fault(
        "prompt tokens are scored one too early",
        file,
        "return sequence.tokens[start + 1 : start + work.num_tokens + (not work.is_decoding)]",
        "return sequence.tokens[start : start + work.num_tokens - work.is_decoding]",
        (f"{_SETTLING}::test_a_prompt_in_chunks_is_scored_once_and_whole",),
    )
    yield Fault(
        "a prompt that is computed again is scored twice",
        file,
        "new = scored[max(0, num_known - sequence.num_computed) :]",
        "new = scored",
        (f"{_SETTLING}::test_a_prompt_in_chunks_is_scored_once_and_whole",),
    )
    file = f"{_WORKERS}/verify/sessions.py"
    yield Fault(
        "a token that the target lacks is cut instead of rejected",
        file,
        "return tokens[: index + 1]",
        "return tokens[:index]",
        (_PROPOSED,),
    )
    yield Fault(
        "the laws of drafted tokens are kept under rejection alone",
        file,
        'sequence.sampler.rule not in ("rejection", "block")',
        'sequence.sampler.rule != "rejection"',
        (_PROPOSED,),
    )
    yield Fault(
        "a law that cannot have given its token is believed",
        file,
        "if law.probability(token) <= 0:",
        "if law.probability(token) < 0:",
        (_PROPOSED,),
    )
    file = f"{_WORKERS}/model/grammar_constraint.py"
    yield Fault(
        "a grammar is not rolled back",
        file,
        "        if surplus > 0:\n            self._matcher.rollback(surplus)\n",
        "",
        (f"{_GRAMMAR}::test_rows_over_drafts_equal_rows_without_a_past",),
    )
    yield Fault(
        "a grammar goes on behind an end",
        file,
        "            self._rows.append(self._vocabulary.ends)\n",
        "            self._rows.append(self._vocabulary.texts)\n",
        (f"{_GRAMMAR}::test_behind_an_end_there_are_only_ends",),
    )
    yield Fault(
        "a draft that breaks the model breaks the rows before it",
        f"{_WORKERS}/model/runner.py",
        "if num_drafted and BAD_LOGITS in best[start : end - 1]:",
        "if num_drafted > len(best):",
        (f"{_RUNNER}::test_a_draft_that_breaks_the_model_fails_only_the_job_that_accepts_it",),
    )
    yield Fault(
        "a proposal is dropped where blocks are short for all of it",
        f"{_WORKERS}/verify/scheduler.py",
        "            drafted = drafted[: max(0, self.tables.room(sequence) - tokens)]\n",
        "            if len(drafted) > self.tables.room(sequence) - tokens:\n"
        "                drafted = []\n",
        (
            f"{_SCHEDULER}"
            "::test_whether_a_draft_is_judged_in_a_full_pool_does_not_depend_on_those_behind_it",
        ),
    )
    yield Fault(
        "a seed does not choose coupled",
        "broker_config/pilotfish_broker/sampling.py",
        'return "rejection" if self.seed is None else "coupled"',
        'return "rejection"',
        ("tests/unit/test_broker_sampling.py",),
    )

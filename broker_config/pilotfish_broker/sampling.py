"""How a job's tokens are chosen and where its output ends, as it is asked for at submit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

from pilotfish_broker import sampling_checks as checks
from pilotfish_broker.checks import (
    Check,
    flag,
    number,
    one_of,
    optional,
    some_token_ids,
    token_ids,
    whole,
)
from pilotfish_broker.errors import InvalidRequest, UnsupportedParameter
from pilotfish_broker.settings import MAX_DRAFT_TOKENS

Rule = Literal["greedy", "rejection", "block", "coupled"]
RULES: tuple[Rule, ...] = ("rejection", "block", "coupled")
MAX_TOKENS = 1 << 20
MAX_SAMPLES = 128
MAX_LOGPROBS = 20
STRUCTURES = ("json_schema", "regex", "grammar")

_share = partial(number, low=0.0, high=1.0, is_open=True)
_penalty = partial(number, low=-2.0, high=2.0)
_logprobs = optional(partial(whole, low=0, high=MAX_LOGPROBS))
CHECKS: Mapping[str, Check] = {
    "max_tokens": partial(whole, low=1, high=MAX_TOKENS),
    "min_tokens": partial(whole, low=0, high=MAX_TOKENS),
    "temperature": checks.temperature,
    "top_k": checks.top_k,
    "top_p": _share,
    "min_p": partial(number, low=0.0, high=1.0),
    "typical_p": _share,
    "repetition_penalty": partial(number, low=0.01, high=100.0),
    "frequency_penalty": _penalty,
    "presence_penalty": _penalty,
    "logit_bias": checks.logit_bias,
    "bad_words": checks.bad_words,
    "allowed_token_ids": optional(some_token_ids),
    "stop": checks.stop,
    "include_stop_str_in_output": flag,
    "stop_token_ids": token_ids,
    "ignore_eos": flag,
    "seed": optional(partial(whole, low=-(1 << 63), high=(1 << 64) - 1)),
    "n": partial(whole, low=1, high=MAX_SAMPLES),
    "logprobs": _logprobs,
    "prompt_logprobs": _logprobs,
    "echo": flag,
    "json_schema": optional(checks.json_schema),
    "regex": optional(checks.structure),
    "grammar": optional(checks.structure),
    "rule": optional(partial(one_of, words=RULES)),
    "speculation": partial(checks.speculation, most=MAX_DRAFT_TOKENS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when to stop; checked, and each value in one form.

    Lists may be given for tuples, whole numbers for others.

    The law of each token is the target's, after this chain: `logit_bias`, `repetition_penalty`,
    `frequency_penalty` and `presence_penalty`, `bad_words`, `min_tokens`, `allowed_token_ids`,
    the structured output's mask, `temperature`, `top_k`, `top_p`, `min_p`, `typical_p`. The order
    is that of transformers, where it has the parameter.

    Attributes:
        max_tokens: most tokens to generate, at least 1; the model's context may end it sooner.
        min_tokens: no end-of-sequence token, stop token or stop string before so many tokens.
        temperature: 0 is greedy, the most likely token after the chain; from 0.001 to 100, logits
            are divided by it.
        top_k: only the k most likely tokens (ties with the k-th stay); 0, or -1, for all.
        top_p: only the most likely tokens whose probabilities reach it together, above 0; 1 for
            all.
        min_p: only tokens at least so likely, relative to the most likely one; 0 for all.
        typical_p: only the most typical tokens (Meister et al., arXiv 2202.00666) whose
            probabilities reach it together, above 0; 1 for all.
        repetition_penalty: logits of tokens that stand in prompt or output are divided by it
            where positive and multiplied where negative, 0.01 to 100; 1 for none.
        frequency_penalty: subtracted from a token's logit for each time it stands in the output,
            -2 to 2.
        presence_penalty: subtracted once from the logits of tokens that stand in the output, -2
            to 2.
        logit_bias: (token id, added to its logit), ids in ascending order, biases from -100 to
            100. Taken as a mapping too, with ids or their digits as keys.
        bad_words: texts, or tuples of token ids, that the output may not contain.
        allowed_token_ids: the only tokens that may come, in ascending order; None for all.
        stop: texts that end the output; one may be given without a list. They are not shown
            unless `include_stop_str_in_output`.
        include_stop_str_in_output: show the stop string that ended the output.
        stop_token_ids: further token ids that end the output, in ascending order; like the
            model's own end-of-sequence token, the one that stops is kept in the token ids and not
            in the text.
        ignore_eos: go on after the model's end-of-sequence tokens. Not with structured output,
            whose end is such a token.
        seed: the same seed gives the same tokens again, under the rule "coupled".
        n: samples of the prompt, each an output of its own, at most 128.
        logprobs: give the log-probability of each output token and of the `logprobs` most likely
            ones, by the model's own logits before the chain; None for none, 0 for the token
            alone, at most 20.
        prompt_logprobs: the same for the prompt's tokens.
        echo: the visible text begins with the prompt, which is then no list of chat messages.
        json_schema: the output is JSON that follows this JSON schema. Taken as JSON text, or as
            what that stands for; kept as text without blanks.
        regex: the output matches this regular expression.
        grammar: the output follows this grammar, in Lark's syntax. Of these three one at most,
            of 64 KiB at most.
        rule: how drafted tokens are judged: "rejection", "block" or "coupled"; None for
            "coupled" with a seed, else "rejection". At temperature 0 it is taken and changes
            nothing.
        speculation: "auto", "off", or a fixed number of drafted tokens a round.

    Raises:
        InvalidRequest: a value is out of range.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None
    rule: str | None = None
    speculation: str | int = "auto"

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}",
                field="min_tokens",
            )
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(
                f"{' and '.join(given)} cannot be combined; give one of them", field=given[1]
            )
        if given and self.ignore_eos:
            raise InvalidRequest(
                f"ignore_eos cannot be combined with {given[0]}, which ends with the model's "
                "end-of-sequence token; limit the output by max_tokens",
                field="ignore_eos",
            )

    @property
    def chosen_rule(self) -> Rule:
        """The rule that judges this job's drafted tokens."""
        if self.temperature == 0:
            return "greedy"
        for rule in RULES:
            if rule == self.rule:
                return rule
        return "rejection" if self.seed is None else "coupled"

    @property
    def is_structured(self) -> bool:
        """Whether the output must follow a schema, an expression or a grammar."""
        return any(getattr(self, name) is not None for name in STRUCTURES)

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits of later ones, each by itself."""
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )

    @property
    def changes_logits(self) -> bool:
        """Whether greedy decoding has to look at more than the model's own logits."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.bad_words
            or self.min_tokens
            or self.allowed_token_ids is not None
            or self.is_structured
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Parameters by name; a name that is not honoured is refused, never ignored.

        Raises:
            UnsupportedParameter: a name that no field honours.
            InvalidRequest: a value is out of range.
        """
        known = {item.name for item in fields(cls)}
        for name in values:
            if name not in known:
                raise UnsupportedParameter(
                    f"parameter {name!r} is not supported; supported are "
                    + ", ".join(sorted(known)),
                    field=name,
                )
        return cls(**values)

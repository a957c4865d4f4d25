"""How a job's tokens are chosen and where its output ends, as it is asked for at submit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from pilotfish_broker.errors import InvalidRequest, UnsupportedParameter

Rule = Literal["greedy", "rejection", "block", "coupled"]
MAX_TOKENS = 1 << 20
RULES: tuple[Rule, ...] = ("rejection", "block", "coupled")


def whole(name: str, value: Any, low: int, high: int) -> None:
    """Check a whole number.

    Raises:
        InvalidRequest: it is none, or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be a whole number, not {value!r}", field=name)
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must lie between {low} and {high}, not {value}", field=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when to stop.

    The law of each token is the target's, after this chain: `logit_bias`, `repetition_penalty`,
    `frequency_penalty` and `presence_penalty`, `bad_words`, `min_tokens`, `allowed_token_ids`,
    the structured output's mask, `temperature`, `top_k`, `top_p`, `min_p`, `typical_p`. The order
    is that of transformers, where it has the parameter.

    Attributes:
        max_tokens: most tokens to generate, at least 1; the model's context may end it sooner.
        min_tokens: no end-of-sequence token, stop token or stop string before so many tokens.
        temperature: 0 is greedy, the most likely token after the chain; above it, logits are
            divided by it.
        top_k: only the k most likely tokens (ties with the k-th stay); 0 for all.
        top_p: only the most likely tokens whose probabilities reach it together; 1 for all.
        min_p: only tokens at least so likely, relative to the most likely one; 0 for all.
        typical_p: only the most typical tokens (Meister et al., arXiv 2202.00666) whose
            probabilities reach it together; 1 for all.
        repetition_penalty: logits of tokens that stand in prompt or output are divided by it
            where positive and multiplied where negative; 1 for none.
        frequency_penalty: subtracted from a token's logit for each time it stands in the output.
        presence_penalty: subtracted once from the logits of tokens that stand in the output.
        logit_bias: (token id, added to its logit), ids in ascending order. Taken as a mapping.
        bad_words: texts, or tuples of token ids, that the output may not contain.
        allowed_token_ids: the only tokens that may come; None for all.
        stop: texts that end the output. They are not shown unless `include_stop_str_in_output`.
        include_stop_str_in_output: show the stop string that ended the output.
        stop_token_ids: further token ids that end the output; like the model's own
            end-of-sequence token, the one that stops is kept in the token ids and not in the text.
        ignore_eos: go on after the model's end-of-sequence tokens.
        seed: the same seed gives the same tokens again, under the rule "coupled".
        n: samples of the prompt, each an output of its own.
        logprobs: give the log-probability of each output token and of the `logprobs` most likely
            ones, by the model's own logits before the chain; None for none, 0 for the token alone.
        prompt_logprobs: the same for the prompt's tokens.
        echo: the visible text begins with the prompt.
        json_schema: the output is JSON that follows this JSON schema (a JSON text).
        regex: the output matches this regular expression.
        grammar: the output follows this grammar, in Lark's syntax.
        rule: how drafted tokens are judged: "rejection", "block" or "coupled"; None for
            "coupled" with a seed, else "rejection". Greedy decoding needs none.
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
        return any(value is not None for value in (self.json_schema, self.regex, self.grammar))

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

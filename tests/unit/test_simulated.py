"""Models without weights behave like models: exact, repeatable, and without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pilotfish_broker.errors import ConfigError, UnsupportedParameter
from pilotfish_broker.sampling import SamplingParams
from pilotfish_workers.model.interface import Rows
from pilotfish_workers.simulated import SimulatedModel, SimulatedText
from pilotfish_workers.speculative.accept import Outcome
from pilotfish_workers.speculative.sampler import Case, Draw, Drawn
from tests.worker_kit import plain, sampler_of

FAST = "simulated:pass_ms=0"


def test_any_two_of_them_agree_on_the_next_token() -> None:
    prompt = [3, 1, 4]
    slow = SimulatedModel("simulated:pass_ms=1,token_ms=0.01")
    assert plain(SimulatedModel(FAST), prompt, 20) == plain(slow, prompt, 20)


def test_several_tokens_in_one_pass_give_what_single_passes_give() -> None:
    model, prompt = SimulatedModel(FAST), [3, 1, 4]
    output = plain(model, prompt, 6)
    tokens = prompt + output[:-1]
    table = model.pool.allocate(1)
    answers = model.greedy(
        [
            Rows(tokens, 0, table, 6),
            Rows(tokens[4:], 4, table, 1),
            Rows(tokens[:2], 0, table, 0),
        ]
    )
    assert answers == [output, output[-1:], []]


def test_it_judges_and_drafts_by_the_same_answers() -> None:
    model, prompt = SimulatedModel(FAST), [3, 1, 4]
    output, table = plain(model, prompt, 3), model.pool.allocate(1)
    sampler = sampler_of(prompt, 3)
    wrong = (output[1] + 1) % 512
    rows = [Rows([*prompt, output[0], wrong], 0, table, 3), Rows(prompt, 0, table, 0)]
    outcomes = model.verify(rows, [Case(sampler, [output[0], wrong]), None])
    assert outcomes == [Outcome(num_accepted=1, token=output[1]), None]
    rows = [Rows([*prompt, output[0]], 0, table, 1), Rows(prompt, 0, table, 0)]
    assert model.draw(rows, [Draw(sampler, output[:1]), None]) == [Drawn(output[1]), None]


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"presence_penalty": 1.0}])
def test_what_needs_logits_is_refused(params: dict[str, float]) -> None:
    model = SimulatedModel(FAST)
    sampler, rows = sampler_of([3], 1, **params), [Rows([3], 0, model.pool.allocate(1), 1)]
    with pytest.raises(ValueError, match="logits"):
        model.verify(rows, [Case(sampler)])
    with pytest.raises(ValueError, match="logits"):
        model.draw(rows, [Draw(sampler)])


@pytest.mark.parametrize(("agree", "low", "high"), [(100, 1, 1), (80, 0.7, 0.9), (0, 0, 0)])
def test_a_draft_model_agrees_at_about_the_share_of_positions_it_is_told(
    agree: int, low: float, high: float
) -> None:
    target, draft = SimulatedModel(FAST), SimulatedModel(f"{FAST},agree={agree}")
    table = target.pool.allocate(200)
    tokens = [number * 7 % 512 for number in range(2000)]
    same = [
        a == b
        for a, b in zip(
            target.greedy([Rows(tokens, 0, table, 2000)])[0],
            draft.greedy([Rows(tokens, 0, table, 2000)])[0],
            strict=True,
        )
    ]
    assert low <= sum(same) / len(same) <= high


def test_the_options_shape_the_model() -> None:
    model = SimulatedModel(f"{FAST},vocab=64,context=100,kv_tokens=320")
    assert (model.info.vocab_size, model.info.context_length) == (64, 100)
    assert model.pool.num_blocks * model.pool.block_size == 320
    assert all(token < 64 for token in plain(model, [1], 50))


@pytest.mark.parametrize(
    "description",
    [
        "simulated:pas_ms=3",
        "simulated:pass_ms=soon",
        "simulated:pass_ms",
        "simulated:vocab=nan",
        "simulated:vocab=0",
        "simulated:vocab=inf",
        "simulated:pass_ms=-1",
        "simulated:kv_tokens=3",
        "simulated:context=0",
    ],
)
def test_a_wrong_option_is_refused_by_name(description: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SimulatedModel(description)
    assert description.partition(":")[2].partition("=")[0] in str(caught.value)


def test_text_round_trips_into_as_many_letters_as_tokens() -> None:
    text = SimulatedText(512)
    ids = text.encode("héllo")
    assert len(ids) == 6
    assert max(ids) < 512
    whole = text.decode(ids)
    detokenizer = text.detokenizer()
    assert detokenizer.push(ids[:2]) + detokenizer.push(ids[2:]) + detokenizer.flush() == whole
    assert text.chat([{"role": "user", "content": "a"}]) == text.encode("a")
    assert b"".join(map(text.token_bytes, ids)).decode() == whole
    assert text.word_ids("héllo") == [tuple(ids)]


def test_text_follows_no_grammar() -> None:
    text = SimulatedText(512)
    assert text.constraint(SamplingParams(), vocab_size=512, eos_ids=()) is None
    with pytest.raises(UnsupportedParameter):
        text.constraint(SamplingParams(regex="a+"), vocab_size=512, eos_ids=())


def test_tokenizers_of_one_vocabulary_size_match_and_others_do_not() -> None:
    assert SimulatedText(64).fingerprint() == SimulatedText(64).fingerprint()
    assert SimulatedText(64).fingerprint() != SimulatedText(65).fingerprint()
    assert len(SimulatedText(64).vocabulary()) == 64


def test_torch_is_not_loaded() -> None:
    script = (
        "import sys; from pilotfish_workers.simulated import SimulatedModel;"
        f"SimulatedModel('{FAST}'); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=60)
    assert done.returncode == 0

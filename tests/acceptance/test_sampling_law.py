"""Sampled output of a deployment has the target's law, by every rule.

Real processes, and a drafter that has nothing to do with the target. Each of two requests asks for
32 samples of 128 tokens; every token is judged by its law after all the tokens before it (see
system_law_kit).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from pilotfish import SamplingParams
from tests.acceptance.conftest import StartFleet
from tests.fleet_kit import Fleet
from tests.law_kit import ALPHA
from tests.process_kit import LIMIT_SECONDS
from tests.system_law_kit import Reference, Samples, greedy, p_value, repeated
from tests.tiny_models import build_tiny

RULES = ("rejection", "block", "coupled")
NUM_SAMPLES, LENGTH = 32, 128
PROMPT = [5, 70, 71, 72, 73, 74]
FEW = (70, 72, 74, 76, 78, 80)
COMMON: dict[str, Any] = {
    "n": NUM_SAMPLES,
    "max_tokens": LENGTH,
    "ignore_eos": True,
    "speculation": 3,
    "allowed_token_ids": FEW,
}
REQUESTS: dict[str, dict[str, Any]] = {
    "top_k": {"temperature": 3.0, "top_k": 3},
    "frequency_penalty": {"temperature": 0.6, "frequency_penalty": 0.8},
}
WITHOUT: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "frequency_penalty": 0.0}

pytestmark = [pytest.mark.acceptance, pytest.mark.slow, pytest.mark.integration]


@dataclass(frozen=True, slots=True)
class Deployment:
    """A fleet, and what its two models do by definition."""

    fleet: Fleet
    target: Reference
    drafter: Reference


@pytest.fixture(scope="module")
def deployment(
    start_fleet: StartFleet, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("models")
    target = build_tiny(folder / "target", "llama", 1, num_layers=1, hidden=16)
    drafter = build_tiny(folder / "drafter", "llama", 2, num_layers=1, hidden=16)
    slots = str(len(REQUESTS) * NUM_SAMPLES)
    common = ["--target", str(target), "--dtype", "float32", "--slots", slots]
    fleet = start_fleet("law", verify=common, draft=[*common, "--draft", str(drafter)])
    fleet.start("verify")
    fleet.start("draft")
    references = Reference(target, PROMPT), Reference(drafter, PROMPT)
    fleet.await_ready()
    yield Deployment(fleet, *references)
    fleet.close()


@pytest.mark.parametrize("rule", RULES)
def test_the_law_is_the_targets(deployment: Deployment, rule: str) -> None:
    seed = 5 if rule == "coupled" else None
    client = deployment.fleet.client
    jobs = {
        name: client.submit(
            PROMPT, SamplingParams(**COMMON, **values, rule=rule, seed=seed), id=f"{rule}-{name}"
        )
        for name, values in REQUESTS.items()
    }
    for name, job in jobs.items():
        samples = Samples()
        for result in job.result(timeout=LIMIT_SECONDS).samples:
            samples.add(result.token_ids, result)
        check(deployment, name, samples)


def check(deployment: Deployment, name: str, samples: Samples) -> None:
    """The law is right; that of the drafter, or without a parameter, would not be."""
    assert [len(output) for output in samples.outputs] == [LENGTH] * NUM_SAMPLES
    assert 0 < samples.accepted < samples.drafted
    assert samples.drafted > samples.num_tokens / 8, "the drafter hardly took part"
    params = SamplingParams(**COMMON, **REQUESTS[name])
    target = deployment.target.read(samples.outputs)
    laws = target.laws(params)
    drafted = deployment.drafter.read(samples.outputs).laws(params)
    favours = [drafted, greedy(drafted), repeated(samples.outputs, laws)]
    assert p_value(samples.outputs, laws, favours) > ALPHA, name
    wrong = {"drafter": drafted} | {
        left_out: target.laws(replace(params, **{left_out: WITHOUT[left_out]}))
        for left_out in REQUESTS[name]
    }
    for what, others in wrong.items():
        assert p_value(samples.outputs, others, [laws]) < ALPHA, (name, what)

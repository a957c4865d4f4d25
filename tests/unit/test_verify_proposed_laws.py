"""The laws that come with a proposal: kept where the job's rule looks at them, and checked."""

from __future__ import annotations

import numpy as np
import pytest

from pilotfish_broker.messages import Open, Proposal
from pilotfish_workers.speculative.law import SparseLaw
from pilotfish_workers.verify.sequence import Sequence
from pilotfish_workers.verify.sessions import Sessions
from tests.worker_kit import active_of, job_spec

VOCABULARY = 50


def taken(tokens: list[int], q: list[bytes] | None, **params: object) -> Sequence:
    """A sequence that has been offered this proposal, and has not refused it."""
    spec = job_spec(max_tokens=20, **{"temperature": 1.0, **params})
    sequence = active_of(spec, [1, 2, 3, 4], 3)
    sessions = Sessions()
    assert sessions.open(sequence, Open(sequence.job, sequence.epoch, "pf:inbox:d", 1)) is None
    sessions.ask(sequence, now=0.0)
    assert sequence.session is not None
    frame = Proposal(sequence.session.handle, 1, sequence.digest, tokens, q)
    assert sessions.take(sequence, frame, VOCABULARY, 0.001)
    return sequence


def law_of(*ids: int) -> SparseLaw:
    return SparseLaw(np.array(ids), np.arange(1, len(ids) + 1, dtype=np.float32))


LAWS = [law_of(7, 8), law_of(9, 7, 3), law_of(60, 4)]
Q = [law.to_bytes() for law in LAWS]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_each_drafted_token_keeps_its_law(rule: str) -> None:
    sequence = taken([8, 3, 4], Q, rule=rule)
    assert sequence.drafted == [8, 3, 4]
    assert sequence.laws is not None
    assert [law.to_bytes() for law in sequence.laws] == Q


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"rule": "coupled"}, {"seed": 1}])
def test_a_rule_that_needs_no_laws_gets_none(params: dict[str, object]) -> None:
    sequence = taken([8, 3, 4], Q, **params)
    assert (sequence.drafted, sequence.laws) == ([8, 3, 4], None)


def test_tokens_that_were_certain_come_without() -> None:
    sequence = taken([8, 3], None, rule="block")
    assert (sequence.drafted, sequence.laws) == ([8, 3], None)


def test_a_token_that_the_target_lacks_is_the_last_and_has_its_law_too() -> None:
    sequence = taken([8, 60, 4], [Q[0], Q[2], Q[2]], rule="rejection")
    assert sequence.drafted == [8, 60]
    assert sequence.laws is not None
    assert [law.to_bytes() for law in sequence.laws] == [Q[0], Q[2]]


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(
    ("tokens", "q"),
    [
        pytest.param([8, 4], Q[:2], id="a token that its law does not have"),
        pytest.param([8, 3], Q[:1], id="a law too few"),
        pytest.param([8, 3], [Q[0], b"1234567"], id="bytes that are no law"),
        pytest.param([8, 3], [Q[0], b""], id="no bytes"),
    ],
)
def test_laws_that_cannot_be_right_leave_no_proposal(
    tokens: list[int], q: list[bytes], rule: str
) -> None:
    sequence = taken(tokens, q, rule=rule)
    assert (sequence.drafted, sequence.laws) == ([], None)
    assert sequence.is_ready(0.001), "the round goes on without it"

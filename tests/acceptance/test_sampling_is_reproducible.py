"""A seed means the same tokens, whoever drafts, however much, beside whom, on which worker, and
whoever is killed in the middle.

What must come is computed from the documentation, without any of the workers' code (see
plain_kit.py). The target attends to its last 32 tokens only, so that all outputs cross its window,
with rejections on the way.
"""

from __future__ import annotations

import re
import signal
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Any

import pytest

from pilotfish import JobRecord, JobSpec, SamplingParams, Status
from pilotfish.samples import sample_id
from pilotfish_broker.keys import Keys
from tests.acceptance.conftest import StartFleet
from tests.fleet_kit import Fleet
from tests.plain_kit import Ask, Language, PlainDecoding
from tests.process_kit import LIMIT_SECONDS, Program, wait_until
from tests.reference_kit import Line, check_results, check_stream
from tests.tiny_models import build_tiny

WINDOW = 32
PROMPT = [5, 70, 71, 72, 73, 74, 75, 76, 70, 71, 72, 77, 78, 79, 80, 81, 82, 83, 84, 85]
LONGEST, SHORT = 160, 40
LEASE_SECONDS = "1.5"
OFF_AND_ALL: tuple[str | int, ...] = ("off", *range(1, 9))
TRIES = 4
FEW = tuple(range(69, 77))

pytestmark = [pytest.mark.acceptance, pytest.mark.slow, pytest.mark.integration]

# Texts of one length, so that one text of the language shows what completes a beginning of it.
UNIT, UNITS = "[a-d]{3}(in|on|an) ", 22
WHOLE = "aaain " * UNITS + "."
REGEX = f"({UNIT}){{{UNITS}}}[.]"
STRUCTURE = Language(
    begins=lambda text: bool(re.fullmatch(REGEX, text + WHOLE[len(text) :])),
    is_whole=lambda text: bool(re.fullmatch(REGEX, text)),
)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"ignore_eos": True, "max_tokens": LONGEST, "temperature": 1} | values)


# All ways to choose that do not exclude each other, and seeds of all sizes.
VARIANTS = {
    "samples": params(n=3, seed=0),
    "nucleus": params(
        temperature=0.8,
        top_p=0.9,
        repetition_penalty=1.2,
        frequency_penalty=0.6,
        presence_penalty=0.8,
        allowed_token_ids=tuple(range(100, 116)),
        seed=11,
    ),
    "min-p": params(temperature=1.5, min_p=0.03, top_k=60, seed=(1 << 64) - 1),
    "few": params(
        typical_p=0.9,
        allowed_token_ids=FEW,
        bad_words=((70, 72), (71, 71, 73)),
        logit_bias={70: 1.5, 73: -1},
        seed=-(1 << 63),
    ),
    "ending": params(logit_bias={0: 4.5}, min_tokens=20, ignore_eos=False, seed=-2),
    "regex": params(regex=REGEX, ignore_eos=False, seed=3),
}


def names_of(name: str) -> list[str]:
    """The records of a job, by sample; the first bears the job's own name."""
    return [name, *(f"{name}.{sample}" for sample in range(1, VARIANTS[name].n))]


def asks() -> dict[str, Ask]:
    """All samples of all variants."""
    return {
        record: Ask(PROMPT, asked, sample, STRUCTURE if asked.regex else None)
        for name, asked in VARIANTS.items()
        for sample, record in enumerate(names_of(name))
    }


@dataclass(slots=True)
class Deployment:
    """One target, its references, and whoever drafts for it."""

    fleet: Fleet
    plain: PlainDecoding
    drafters: dict[str, str]
    redis: Any
    keys: Keys
    drafting: dict[str, Program] = field(default_factory=dict)
    submitted: int = 0

    def prepare(self, drafter: str) -> None:
        """Start a drafter that a later test needs; until it is ready it takes no part."""
        if drafter not in self.drafting:
            options = ["--draft", self.drafters[drafter]]
            self.drafting[drafter] = self.fleet.start("draft", *options)

    def draft_by(self, *names: str) -> None:
        """Let these drafters run and no others."""
        for name in set(self.drafting) - set(names):
            self.drafting.pop(name).kill()
        for name in names:
            self.prepare(name)
        self.fleet.await_ready()

    def submit(
        self,
        max_tokens: int,
        speculations: Iterable[str | int],
        variants: Iterable[str] = VARIANTS,
    ) -> dict[str, Line]:
        """Submit each variant for each `speculation`; gives what must come, by record."""
        self.submitted += 1
        specs: dict[str, JobSpec] = {}
        wanted: dict[str, Line] = {}
        for speculation, name in product(speculations, variants):
            asked = VARIANTS[name]
            asked = replace(asked, max_tokens=max_tokens, speculation=speculation)
            job = f"t{self.submitted}-{speculation}-{name}"
            specs[job] = JobSpec(model="tiny", prompt=PROMPT, params=asked)
            for sample, record in enumerate(names_of(name)):
                wanted[sample_id(job, sample)] = self.plain.line(record, max_tokens)
        self.fleet.client.submit_many(specs.values(), ids=specs)
        return wanted

    def records(self, jobs: Iterable[str]) -> list[JobRecord]:
        """Those that there are."""
        return [record for record in self.fleet.client.records(jobs) if record is not None]

    def await_end(self, jobs: dict[str, Line]) -> list[JobRecord]:
        """Wait until all have ended, then check all that was committed; gives the records."""

        def all_ended() -> bool:
            return all(record.status.is_terminal for record in self.records(jobs))

        wait_until(all_ended, "all jobs to end", self.programs)
        check_results(self.fleet.client, jobs)
        for job, line in jobs.items():
            check_stream(self.redis, self.keys, job, line)
        return self.records(jobs)

    def await_middle(self, jobs: dict[str, Line], owner: str = "") -> None:
        """Wait until drafts of several running jobs were accepted; of `owner`'s, if given."""

        def is_middle() -> bool:
            return (
                sum(
                    record.status is Status.RUNNING
                    and record.accepted > 0
                    and owner in ("", record.worker)
                    for record in self.records(jobs)
                )
                > 3
            )

        wait_until(is_middle, "jobs to be in their middle", self.programs)

    @property
    def programs(self) -> list[Program]:
        """All that run."""
        return [*self.fleet.running("verify"), *self.fleet.running("draft")]


@pytest.fixture(scope="module")
def deployment(
    start_fleet: StartFleet, tmp_path_factory: pytest.TempPathFactory, valkey: Any
) -> Deployment:
    folder = tmp_path_factory.mktemp("reproducible")
    target = build_tiny(folder / "tiny", "mistral", seed=0, sliding_window=WINDOW)
    other = build_tiny(folder / "other", "llama", seed=7)
    common = ["--target", str(target), "--dtype", "float32", "--lease-seconds", LEASE_SECONDS]
    fleet = start_fleet(
        "reproducible",
        verify=[*common, "--slots", "24", "--kv-tokens", "16384"],
        draft=[*common, "--slots", "96"],
    )
    fleet.start("verify")
    fleet.start("verify")
    drafters = {"another": str(other), "itself": str(target), "ngram": "ngram"}
    drafting = {"another": fleet.start("draft", "--draft", drafters["another"])}
    plain = PlainDecoding(target, asks())
    return Deployment(fleet, plain, drafters, valkey.client(), Keys("reproducible"), drafting)


def run_matrix(deployment: Deployment, drafter: str = "") -> tuple[list[JobRecord], Counter[Any]]:
    """Run every variant with every K; each must give its one output.

    Returns:
        the records, and the drafted tokens that were not accepted by K. Where there is a drafter,
        it has drafted for each K, but without speculation never.
    """
    jobs = deployment.submit(SHORT, OFF_AND_ALL)
    if drafter == "another":
        deployment.prepare("itself")
    records = deployment.await_end(jobs)
    drafted, rejected = count(records)
    for _ in range(TRIES if drafter else 0):
        # on a busy machine short jobs may end before their drafter has begun
        if undrafted := [k for k in OFF_AND_ALL[1:] if not drafted[k]]:
            records += deployment.await_end(deployment.submit(LONGEST, undrafted, ["few"]))
            drafted, rejected = count(records)
    assert {k for k in OFF_AND_ALL if drafted[k]} == set(OFF_AND_ALL[1:] if drafter else ())
    return records, rejected


def count(records: Iterable[JobRecord]) -> tuple[Counter[Any], Counter[Any]]:
    """Tokens that were drafted, and those of them that were rejected, by K."""
    drafted: Counter[Any] = Counter()
    rejected: Counter[Any] = Counter()
    for record in records:
        drafted[record.spec.params.speculation] += record.drafted
        rejected[record.spec.params.speculation] += record.drafted - record.accepted
    return drafted, rejected


def test_the_references_differ(deployment: Deployment) -> None:
    """Else the other tests would show little."""
    outputs = deployment.plain.outputs
    assert len({tuple(output[:SHORT]) for output in outputs.values()}) == len(outputs) == 8
    for first, second in combinations(names_of("samples"), 2):
        assert outputs[first][:4] != outputs[second][:4]
    assert 20 < len(outputs["ending"]) < SHORT
    assert len(PROMPT) < WINDOW < len(PROMPT) + SHORT // 2


def test_drafts_by_another_model_change_nothing_on_either_of_two_workers(
    deployment: Deployment,
) -> None:
    deployment.fleet.ensure(verify=2)
    deployment.draft_by("another")
    records, rejected = run_matrix(deployment, "another")
    assert all(rejected[k] for k in OFF_AND_ALL[1:])
    verify = {deployment.fleet.record(program).id for program in deployment.fleet.running("verify")}
    workers = defaultdict(set)
    for record in records:
        workers[record.spec.params.seed, record.spec.sample].add(record.worker)
    assert verify in workers.values(), "no output was made by both workers"


def test_drafts_by_the_target_itself_are_all_accepted_and_change_nothing(
    deployment: Deployment,
) -> None:
    """Drafter and target draw with the same numbers, whatever the parameters."""
    deployment.fleet.ensure(verify=1)
    deployment.draft_by("itself")
    _, rejected = run_matrix(deployment, "itself")
    assert not any(rejected.values()), rejected


def test_alone_and_among_others_and_after_them_it_is_the_same(deployment: Deployment) -> None:
    deployment.fleet.ensure(verify=1)
    deployment.draft_by("itself")
    for name in ("few", "regex"):
        deployment.await_end(deployment.submit(SHORT, [4], [name]))
    unseeded = params(max_tokens=SHORT)
    others = [
        *[unseeded] * 6,
        replace(unseeded, n=3),
        *[replace(unseeded, temperature=0, speculation=k) for k in (1, 7)],
        *[replace(unseeded, seed=seed, logprobs=3) for seed in range(4)],
        *[replace(unseeded, rule=rule, seed=3, top_p=0.8) for rule in ("rejection", "block")],
        replace(unseeded, repetition_penalty=1.3, stop=("e", "t")),
        replace(unseeded, regex="[a-z ]{60}", ignore_eos=False),
        replace(unseeded, presence_penalty=-2, min_p=0.1, top_k=5),
    ]
    specs = [JobSpec(model="tiny", prompt=PROMPT, params=other) for other in others]
    mates = deployment.fleet.client.submit_many(specs)
    deployment.await_end(deployment.submit(LONGEST, [4]))
    results = [mate.result(timeout=LIMIT_SECONDS) for mate in mates]
    outputs = {tuple(sample.token_ids) for result in results[:7] for sample in result.samples}
    assert len(outputs) == 9, "two jobs without a seed gave the same"
    deployment.await_end(deployment.submit(SHORT, [4], ["few", "samples"]))


def test_a_verify_worker_that_is_killed_changes_nothing(deployment: Deployment) -> None:
    deployment.fleet.ensure(verify=2)
    deployment.draft_by("itself")
    victim, heir = deployment.fleet.running("verify")
    victims_id, heirs_id = deployment.fleet.record(victim).id, deployment.fleet.record(heir).id
    jobs = deployment.submit(LONGEST, [1, 2, 3, 4])
    deployment.await_middle(jobs, owner=victims_id)
    victim.send(signal.SIGKILL)
    victim.wait()
    orphans = [
        record
        for record in deployment.records(jobs)
        if record.worker == victims_id and record.status is Status.RUNNING
    ]
    assert sum(record.committed > 0 for record in orphans) > 1, "it left nothing that had begun"
    records = {record.id: record for record in deployment.await_end(jobs)}
    assert {records[orphan.id].worker for orphan in orphans} == {heirs_id}


def test_a_drafter_that_is_killed_and_another_that_takes_over_change_nothing(
    deployment: Deployment,
) -> None:
    deployment.fleet.ensure(verify=1)
    deployment.draft_by("itself")
    jobs = deployment.submit(LONGEST, [1, 2, 8])
    deployment.await_middle(jobs)
    before = deployment.records(jobs)
    deployment.draft_by("ngram")
    deployment.await_end(jobs)
    assert sum(record.status is Status.RUNNING for record in before) > 1, "it had nothing to do"


def test_drafts_by_ngrams_change_nothing(deployment: Deployment) -> None:
    deployment.fleet.ensure(verify=1)
    deployment.draft_by("ngram")
    _, rejected = run_matrix(deployment, "ngram")
    assert all(rejected[k] for k in OFF_AND_ALL[1:])


def test_without_a_drafter_it_is_the_same(deployment: Deployment) -> None:
    deployment.fleet.ensure(verify=1)
    deployment.draft_by()
    run_matrix(deployment)

"""The engine: pure, monotone in what speaks for a cause, honest about what it cannot tell."""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanproof.diagnosing import Evidence, Fact, diagnose_evidence
from nanproof.diagnosing import cause as cause_module
from nanproof.diagnosing.cause import Cause
from nanproof.diagnosing.causes import all_causes
from nanproof.diagnosing.clue import Clue, flag
from nanproof.diagnosing.commands import Commands
from nanproof.diagnosing.described import FIELDS, read_description
from nanproof.diagnosing.engine import Ranked, excluded, rank, softmax
from nanproof.diagnosing.questions import QUESTIONS
from nanproof.diagnosing.stated import read_facts
from nanproof.diagnosing.vocabulary import FLAGS, ONSETS, PRODUCED
from nanproof.diagnosing.wording import topics

OWN = [json.loads(line) for line in Path(__file__).with_name("incidents_own.jsonl").read_text().splitlines()]
NAMES = {
    "amp-misuse",
    "arch-instability",
    "bad-data",
    "benign",
    "corrupted-checkpoint",
    "ctc-infeasible",
    "data-distribution-spike",
    "distributed-desync",
    "double-fp16",
    "empty-target-mean",
    "eps-underflow",
    "fp16-overflow",
    "framework-bug",
    "hardware-fault",
    "label-out-of-range",
    "logger-masks-nan",
    "loss-scale-collapse",
    "lr-too-high",
    "masked-row",
    "optimizer-eps-beta",
    "scheduler-state-on-resume",
    "uninitialised-params",
    "unstable-op",
    "warmup",
    "where-gradient",
}


@functools.cache
def ranked_of(number: int) -> tuple[Ranked, ...]:
    """The causes with evidence; without the questions, which take most of the time."""
    return tuple(r for r in rank(read_description({k: OWN[number][k] for k in FIELDS})[0]) if r.supported)


flags = st.lists(st.sampled_from(sorted(FLAGS)), max_size=6, unique=True)
onsets = st.sampled_from(["", *sorted(ONSETS)])
about = st.lists(st.sampled_from(sorted(topics())), max_size=4, unique=True)
precision = st.sampled_from(["", "fp16", "bf16", "fp32"])


def evidence_of(names: list[str], onset: str = "", words: tuple[str, ...] | list[str] = (), form: str = "") -> Evidence:
    facts = [Fact(name=n, where="flags") for n in names]
    facts += [Fact(name="onset", value=onset, where="onset")] if onset else []
    facts += [Fact(name="about", value=w, where="symptoms") for w in words]
    facts += [Fact(name="precision", value=form, where="precision")] if form else []
    return Evidence.of(*facts)


def first(stated: dict[str, object]) -> str:
    return diagnose_evidence(Evidence.of(*read_facts(stated))).causes[0].name


def score(evidence: Evidence, name: str) -> float | None:
    return next((r.score for r in rank(evidence) if r.cause.name == name), None)


def test_all_causes_are_there() -> None:
    assert {c.name for c in all_causes()} == NAMES


@pytest.mark.parametrize("cause", all_causes(), ids=lambda c: c.name)
def test_a_cause_says_everything_about_itself(cause: Cause) -> None:
    page = cause.topic.markdown()
    assert page.startswith(f"# {cause.name}: {cause.title}")
    for heading in ("What it is", "Evidence for", "Evidence against", "Repair", "Verify the repair"):
        assert f"## {heading}" in page
    assert cause.remedies[-1].when is None, "the last remedy is for everybody"
    assert sum(c.weight > 0 for c in cause.clues) >= 5
    assert any(c.weight < 0 for c in cause.clues)
    assert "{" not in page


@pytest.mark.parametrize("cause", all_causes(), ids=lambda c: c.name)
def test_a_remedy_names_only_what_exists(cause: Cause) -> None:
    import click

    from nanproof import ops, testing
    from nanproof.cli.shell import nanproof as program

    verbs = program.list_commands(click.Context(program))
    text = " ".join([*(r.does for r in cause.remedies), cause.verify, cause.what])
    for name in re.findall(r"nanproof\.ops\.(\w+)", text):
        assert hasattr(ops, name)
    for name in re.findall(r"nanproof\.testing\.(\w+)", text):
        assert hasattr(testing, name)
    for verb, option in re.findall(r"nanproof (\w+)(?:[^;:,)]*?(--[a-z-]+))?", text):
        assert verb in verbs
        command = program.get_command(click.Context(program), verb)
        assert command is not None
        if option and option not in ("--data", "--model"):  # data scan and fresh-model check come with their own tests
            assert any(option in p.opts for p in command.params), (verb, option)


def test_every_name_has_a_producer() -> None:
    """What a clue asks for is produced by a reader, by --fact or by --evidence; a name that none writes is refused."""
    package = Path(cause_module.__file__).parent
    own = ("vocabulary.py", "signs.py")
    readers = [p for p in package.rglob("*.py") if p.parent.name != "causes" and p.name not in own]
    written = "\n".join(p.read_text() for p in (*readers, *package.glob("*.toml")))
    for name in PRODUCED - set(FLAGS):
        assert re.search(rf"\b{re.escape(name)}\b", written), name
    with pytest.raises(ValueError, match="no reader produces single-process"):
        flag("single-process")


def test_every_flag_onset_and_answer_moves_something() -> None:
    """A word of the vocabulary that changes no score would mean nothing here."""
    neutral = {"loss-nan", "loss-finite", "hard-error", "mid", "any"}
    base = {r.cause.name: r.score for r in rank(evidence_of([], "", ["distributed"]))}
    for name in sorted(FLAGS):
        moved = {r.cause.name: r.score for r in rank(evidence_of([name], "", ["distributed"]))}
        assert moved != base or name in neutral, name
    for onset in sorted(ONSETS):
        moved = {r.cause.name: r.score for r in rank(evidence_of(["loss-nan"], onset, ["distributed"], "fp16"))}
        assert moved != {r.cause.name: r.score for r in rank(evidence_of(["loss-nan"], "", ["distributed"], "fp16"))}, (
            onset
        )
    for question in QUESTIONS:
        answers = [
            tuple(sorted((r.cause.name, r.score) for r in rank(Evidence.of(*question.facts(a)))))
            for a in question.answers
        ]
        assert len(set(answers)) > 1, question.name


@settings(max_examples=15, deadline=None)
@given(flags, onsets, about, precision)
def test_it_is_pure(names: list[str], onset: str, words: list[str], form: str) -> None:
    once, again = (
        evidence_of(names, onset, words, form),
        evidence_of(list(reversed(names)), onset, list(reversed(words)), form),
    )
    assert {r.cause.name: round(r.score, 9) for r in rank(once)} == {
        r.cause.name: round(r.score, 9) for r in rank(again)
    }
    assert diagnose_evidence(once) == diagnose_evidence(once)


@settings(max_examples=15, deadline=None)
@given(flags, onsets, about, precision)
def test_shares_add_up_and_scores_are_finite(names: list[str], onset: str, words: list[str], form: str) -> None:
    ranked = rank(evidence_of(names, onset, words, form))
    assert math.isclose(sum(r.share for r in ranked), 1.0)
    assert all(math.isfinite(r.score) for r in ranked)
    assert [r.score for r in ranked] == sorted((r.score for r in ranked), reverse=True)


def speaks_only_for(cause: Cause, evidence: Evidence, fact: Fact) -> bool:
    """Whether adding a fact lets more clues speak for a cause, and none against it or fall silent."""

    def speaking(e: Evidence) -> tuple[set[int], set[int]]:
        found = [(i, c) for i, c in enumerate(cause.clues) if c.found(e)]
        return {i for i, c in found if c.weight > 0}, {i for i, c in found if c.weight < 0}

    (pro, con), (more, against) = speaking(evidence), speaking(evidence.plus(fact))
    return pro < more and con == against


@settings(max_examples=15, deadline=None)
@given(flags, onsets, about, precision, st.sampled_from(sorted(FLAGS)))
def test_evidence_for_a_cause_never_lowers_it(
    names: list[str], onset: str, words: list[str], form: str, more: str
) -> None:
    evidence, fact = evidence_of(names, onset, words, form), Fact(name=more, where="--fact")
    for cause in all_causes():
        before, after = score(evidence, cause.name), score(evidence.plus(fact), cause.name)
        if before is not None and after is not None and speaks_only_for(cause, evidence, fact):
            assert after > before


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_cause_can_be_the_first(name: str) -> None:
    """Each is named first for most of the incidents in which it is the cause."""
    mine = [i for i, incident in enumerate(OWN) if incident["cause"] == name]
    found = [ranked_of(i)[0].cause.name for i in mine]
    assert len(mine) >= 3
    assert found.count(name) * 2 > len(mine)


def test_the_score_on_our_own_incidents() -> None:
    """Seen to be 93 % and 98 % when this was written; a change of the rules must not lose much of it."""
    places = []
    for i, incident in enumerate(OWN):
        names = [r.cause.name for r in ranked_of(i)]
        places.append(names.index(incident["cause"]) if incident["cause"] in names else 99)
    assert sum(p == 0 for p in places) >= 0.9 * len(OWN)
    assert sum(p < 3 for p in places) >= 0.95 * len(OWN)


def test_benign_is_called_benign_and_nothing_else_is() -> None:
    for i, incident in enumerate(OWN):
        assert (ranked_of(i)[0].cause.name == "benign") == (incident["cause"] == "benign"), incident["id"]


def test_a_word_of_confidence_is_kept() -> None:
    """Of answers called strong 95 % are right, of those called likely 80 %."""
    right: dict[str, list[bool]] = {"strong": [], "likely": [], "possible": []}
    for i, incident in enumerate(OWN):
        first = ranked_of(i)[0]
        right[first.confidence].append(first.cause.name == incident["cause"])
    assert sum(right["strong"]) >= 0.95 * len(right["strong"]) > 0
    assert sum(right["likely"]) >= 0.8 * len(right["likely"]) > 0


def test_prose_alone_is_never_more_than_possible() -> None:
    """Whatever the words of a description are, without a flag, a number or a setting they prove nothing."""
    for incident in OWN:
        told, _ = read_description({k: incident[k] for k in ("symptoms", "model", "framework") if incident.get(k)})
        prose = Evidence.of(*(f for f in told if f.weak))
        assert all(r.confidence == "possible" for r in rank(prose)), incident["id"]


# ---------------------------------------------------------------- what excludes what


@pytest.mark.parametrize("fact", [{"onset": "before-training"}, {"nan-at-lr-0": "yes"}, {"first_loss": "nan"}])
def test_before_any_update_neither_rate_nor_optimizer_nor_schedule(fact: dict[str, object]) -> None:
    evidence = Evidence.of(*read_facts({**fact, "diverges-as-lr-rises": "yes", "lr": "10", "update-norm-leads": "yes"}))
    names = {r.cause.name for r in rank(evidence)}
    assert not names & {"lr-too-high", "warmup", "optimizer-eps-beta"}
    assert "NaN before any update" in excluded(evidence)["lr-too-high"]


def test_no_resume_no_scheduler_state() -> None:
    evidence = Evidence.of(*read_facts({"resumed": "no", "lr_jump": "yes"}))
    assert "scheduler-state-on-resume" not in {r.cause.name for r in rank(evidence)}
    assert "never resumed" in excluded(evidence)["scheduler-state-on-resume"]


@settings(max_examples=15, deadline=None)
@given(flags, onsets, about, precision)
def test_lower_the_rate_is_never_said_without_a_word_about_the_rate_or_growth(
    names: list[str], onset: str, words: list[str], form: str
) -> None:
    for cause in diagnose_evidence(evidence_of(names, onset, words, form)).causes:
        if cause.name in ("lr-too-high", "warmup"):
            assert cause.evidence


# ---------------------------------------------------------------- what the notes say separates causes best


@pytest.mark.parametrize(
    ("stated", "cause"),
    [
        ({"loss": "0.0", "grad_norm": "0.0"}, "empty-target-mean"),
        ({"nan-after-first-step": "yes", "weights": "fp16"}, "double-fp16"),
        ({"grads": "finite", "nan-after-first-step": "yes", "weights": "fp16", "eps": "1e-8"}, "optimizer-eps-beta"),
        ({"lr_jump": "yes", "onset": "after-resume"}, "scheduler-state-on-resume"),
        ({"spike-at-each-resume": "yes", "lr_jump": "no"}, "framework-bug"),
        ({"config-change-ignored": "yes", "resumed": "yes"}, "scheduler-state-on-resume"),
        ({"loss-explodes-before-nan": "yes", "lower_lr": "helps"}, "lr-too-high"),
        ({"loss-explodes-before-nan": "yes", "lower_lr": "delays"}, "arch-instability"),
        ({"loss-nan": "yes", "lower_lr": "nothing"}, "bad-data"),
        ({"lower_lr": "delays", "ctc": "yes"}, "ctc-infeasible"),
        ({"negative-loss": "yes"}, "label-out-of-range"),
        ({"only-with-padding": "yes"}, "masked-row"),
        ({"only-one-gpu-family": "yes"}, "framework-bug"),
        ({"only-multi-gpu": "yes"}, "distributed-desync"),
        ({"same_batch": "yes"}, "bad-data"),
        ({"grad-norm-leads": "yes", "recovers": "yes"}, "benign"),
        ({"spikes-that-stop-recovering": "yes"}, "arch-instability"),
        ({"loss-scale-halving-at-start": "yes", "precision": "fp16"}, "benign"),
        ({"loss_scale": "collapses", "precision": "fp16"}, "loss-scale-collapse"),
        ({"loss-above-uniform": "yes"}, "corrupted-checkpoint"),
        ({"gpu": "NVIDIA GeForce GTX 1660", "precision": "fp16", "loss-nan": "yes"}, "framework-bug"),
    ],
)
def test_the_rules_of_the_notes(stated: dict[str, object], cause: str) -> None:
    assert first(stated) == cause


def test_zero_loss_with_nan_gradient_does_not_mean_fp16() -> None:
    plain = diagnose_evidence(Evidence.of(*read_facts({"loss": "0.0", "grad_norm": "nan"})))
    assert not plain.decided
    assert plain.missing
    assert "fp16-overflow" not in {c.name for c in plain.causes if c.confidence != "possible"}
    assert first({"loss": "0.0", "grad_norm": "nan", "precision": "fp16"}) == "fp16-overflow"
    assert first({"loss": "0.0", "grad_norm": "nan", "hardware": "multi-node", "framework": "DeepSpeed ZeRO-2"}) == (
        "distributed-desync"
    )


# ---------------------------------------------------------------- abstaining and asking


def test_it_abstains_and_asks_when_little_is_known() -> None:
    diagnosis = diagnose_evidence(Evidence.of(Fact(name="loss-nan", where="--fact")))
    assert not diagnosis.decided
    assert diagnosis.missing
    assert all(c.confidence == "possible" for c in diagnosis.causes)


def test_what_it_asks_for_decides() -> None:
    """The answers to the best question do not all lead to the same cause."""
    evidence = Evidence.of(Fact(name="loss-nan"), Fact(name="onset", value="step1"))
    asked = diagnose_evidence(evidence).missing[0]
    led = {diagnose_evidence(evidence.plus(*read_facts({asked.fact: a}))).causes[0].name for a in asked.answers}
    assert len(led) > 1


def test_a_question_never_comes_with_an_answer_filled_in() -> None:
    """Each answer has a command of its own, which states that answer and no other."""
    for asked in QUESTIONS:
        commands = Commands(None, stated={"loss": "nan"}).ask(asked.name, asked.answers)
        assert len(commands) == len(asked.answers) > 1
        for answer, command in zip(asked.answers, commands, strict=True):
            stated = dict(w.split("=", 1) for w in shlex.split(command) if "=" in w)
            assert stated == {"loss": "nan", asked.name: answer}
            assert read_facts(stated)


def test_nothing_is_asked_twice() -> None:
    evidence = Evidence.of(*read_facts({"loss-nan": "yes", "precision": "fp16", "padding": "yes", "resumed": "no"}))
    assert not {m.fact for m in diagnose_evidence(evidence).missing} & {"precision", "padding", "resumed"}


def test_no_evidence_no_causes() -> None:
    assert diagnose_evidence(Evidence.of()).causes == ()


def test_what_speaks_is_cited_with_its_place() -> None:
    clue = Clue(weight=1.0, when=lambda e: e.named("lr"), says="the rate")
    facts = (Fact(name="lr", value=4.92e-4, where="log.txt:31"), Fact(name="lr", value=1e-4, where="config.py:31"))
    assert clue.tell(facts) == "the rate: lr 0.000492 (log.txt:31); lr 0.0001 (config.py:31)"


def test_softmax_of_large_scores() -> None:
    assert softmax([1000.0, 0.0]) == [1.0, 0.0]

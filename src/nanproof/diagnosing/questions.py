"""What only the user knows: the facts that ``--fact`` takes, and which of them would decide best.

>>> from nanproof.diagnosing.engine import rank
>>> evidence = Evidence.of(Fact(name="loss-nan"), Fact(name="onset", value="step1"))
>>> [q.name for q in best_questions(evidence, rank(evidence))][:1]
['precision']

The value of a question is the information that its answers carry about the likeliest causes (their mutual information),
with each answer weighed by how the causes would take it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .engine import Ranked, rank, softmax
from .evidence import Evidence, Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A fact to ask for: its answers, and what each of them says. A leading "!" denies a flag."""

    name: str
    asks: str
    answers: Mapping[str, str]
    """Answer: the facts it stands for, as "flag", "!flag" or "name=value", separated by blanks."""
    effort: float = 1.0
    """1 for a look at something, more for an experiment."""

    def facts(self, answer: str, where: str = "--fact") -> tuple[Fact, ...]:
        return tuple(_fact(word, where, f"{self.name}={answer}") for word in self.answers[answer].split())


def _fact(word: str, where: str, words: str) -> Fact:
    name, _, value = word.partition("=")
    if value:
        return Fact(name=name, value=value, where=where, words=words)
    return Fact(name=name.removeprefix("!"), value=not name.startswith("!"), where=where)


QUESTIONS = (
    Question(
        name="precision",
        asks="which precision does training run in?",
        answers={"fp16": "precision=fp16", "bf16": "precision=bf16", "fp32": "precision=fp32", "fp8": "precision=fp8"},
    ),
    Question(
        name="weights",
        asks="in which dtype are the trained weights?",
        answers={"fp32": "weights=fp32", "fp16": "weights=fp16", "bf16": "weights=bf16"},
    ),
    Question(
        name="attention",
        asks="is attention running on eager, sdpa or flash?",
        answers={
            "sdpa": "attention=sdpa",
            "flash": "attention=flash",
            "xformers": "attention=xformers",
            "cudnn": "attention=cudnn",
            "eager": "!attention attention=eager",
        },
    ),
    Question(
        name="resumed", asks="was the run resumed from a checkpoint?", answers={"yes": "resumed", "no": "never-resumed"}
    ),
    Question(
        name="lr_jump",
        asks="does the learning rate jump in the log?",
        answers={"yes": "lr-discontinuity", "no": "lr-continuous"},
    ),
    Question(
        name="first_loss",
        asks="is the very first loss finite?",
        answers={
            "finite": "loss-first-step-finite",
            "nan": "nan-before-first-update",
            "above-chance": "loss-above-uniform",
        },
    ),
    Question(
        name="grads",
        asks="are the gradients finite before the step?",
        answers={"finite": "grads-finite", "nan": "grad-nan"},
    ),
    Question(
        name="padding",
        asks="does it also happen without padding, with a batch of 1?",
        answers={"yes": "!only-with-padding", "no": "only-with-padding"},
        effort=1.5,
    ),
    Question(
        name="same_batch",
        asks="does it come back at the same batch?",
        answers={"yes": "same-epoch-every-run", "no": "!same-epoch-every-run"},
        effort=1.5,
    ),
    Question(
        name="component",
        asks="is one loss term NaN before the others?",
        answers={"yes": "one-component-nan", "no": "!one-component-nan"},
    ),
    Question(
        name="recovers", asks="does the loss come back by itself?", answers={"yes": "recovers", "no": "!recovers"}
    ),
    Question(
        name="growth",
        asks="does the loss or the gradient norm grow before it breaks?",
        answers={"yes": "loss-explodes-before-nan", "no": "!loss-explodes-before-nan"},
    ),
    Question(
        name="checkpoint",
        asks="is the checkpoint it began from healthy (nanproof scan)?",
        answers={"healthy": "checkpoint-healthy", "nan": "checkpoint-nonfinite"},
    ),
    Question(
        name="data",
        asks="is the data finite and in range (nanproof diagnose --data)?",
        answers={"clean": "data-clean", "bad": "data-nonfinite"},
        effort=1.5,
    ),
    Question(
        name="labels",
        asks="does every batch have a label that counts?",
        answers={"yes": "!labels-all-masked", "no": "labels-all-masked"},
    ),
    Question(
        name="new_parameters",
        asks="does the log name newly initialized weights?",
        answers={"yes": "newly-initialised", "no": "!newly-initialised"},
    ),
    Question(name="ctc", asks="is there a CTC loss?", answers={"yes": "about=ctc", "no": "!ctc"}),
    Question(name="scaler", asks="is there a GradScaler?", answers={"no": "no-scaler", "yes": "!no-scaler"}),
    Question(
        name="loss_scale",
        asks="what does the loss scale do?",
        answers={
            "steady": "!loss-scale-collapse",
            "halves-sometimes": "loss-scale-halving-sparse",
            "collapses": "loss-scale-collapse",
        },
    ),
    Question(
        name="fp32", asks="is it fine in fp32?", answers={"fine": "fp32-fine", "nan": "fp32-also-nan"}, effort=2.0
    ),
    Question(name="cpu", asks="is it fine on the CPU?", answers={"fine": "cpu-fine", "nan": "!cpu-fine"}, effort=2.0),
    Question(
        name="other_gpu",
        asks="is it fine on another kind of GPU?",
        answers={"fine": "only-one-gpu-family", "nan": "!only-one-gpu-family"},
        effort=2.5,
    ),
    Question(
        name="one_gpu",
        asks="is it fine on a single GPU?",
        answers={"fine": "only-multi-gpu", "nan": "!only-multi-gpu"},
        effort=2.0,
    ),
    Question(
        name="lower_lr",
        asks="what does a ten times lower learning rate do?",
        answers={"helps": "lower-lr-helps", "delays": "lower-lr-only-delays", "nothing": "lower-lr-no-help"},
        effort=2.0,
    ),
    Question(
        name="seed",
        asks="does another seed move it?",
        answers={"yes": "seed-change-moves-it", "no": "same-epoch-every-run"},
        effort=2.5,
    ),
    Question(
        name="compiled",
        asks="is it fine without torch.compile?",
        answers={"yes": "compiled", "no": "!compiled"},
        effort=1.5,
    ),
)
WHETHER = Question(
    name="ran",
    asks="what did the loss do?",
    answers={"fell": "loss-finite", "nan": "loss-nan", "grew": "loss-ran-away", "stood-still": "no-learning"},
)
"""What is asked where nothing shows that a run broke, nor that it did not."""
BY_NAME: Mapping[str, Question] = {q.name: q for q in (*QUESTIONS, WHETHER)}

CONSIDERED = 6
WORTH_ASKING = 0.04


def open_question(evidence: Evidence) -> tuple[Question, ...]:
    """What to ask where nothing shows that a run broke, nor that it did not."""
    return () if answered(WHETHER, evidence) else (WHETHER,)


def best_questions(evidence: Evidence, ranked: Sequence[Ranked], limit: int = 3) -> tuple[Question, ...]:
    """The open questions whose answers would split the likeliest causes best."""
    top = ranked[:CONSIDERED]
    if len(top) < 2:
        return ()
    worth = {q.name: information(q, evidence, top) / q.effort for q in QUESTIONS if not answered(q, evidence)}
    chosen = sorted((n for n, w in worth.items() if w >= WORTH_ASKING), key=lambda n: (-worth[n], n))
    return tuple(BY_NAME[n] for n in chosen[:limit])


_SETTLED = {
    "growth": ("loss-jump-before", "grad-explosion", "loss-ran-away", "slow-divergence", "nan-from-first-row"),
    "first_loss": ("nan-from-first-row", "loss-explodes-before-nan", "loss-jump-before", "loss-turned-zero"),
    "lr_jump": ("lr-negative",),
    "labels": ("labels-out-of-range",),
    "recovers": ("loss-nan", "loss-turned-zero", "loss-ran-away"),
    "grads": ("loss-nan",),
    "ctc": ("ctc-unguarded", "ctc-term-bad"),
}
"""Facts that answer a question as well as its own answers do."""


def answered(question: Question, evidence: Evidence) -> bool:
    """Whether any of its answers is known already."""
    if any(evidence.named(name) for name in _SETTLED.get(question.name, ())):
        return True
    for answer in question.answers:
        for fact in question.facts(answer):
            known = evidence.named(fact.name)
            if any(fact.name != "about" or k.value == fact.value for k in known):
                return True
    return False


def information(question: Question, evidence: Evidence, top: Sequence[Ranked]) -> float:
    """The mutual information between the answers and the causes, in nats."""
    shares = softmax([r.score for r in top])
    causes = [r.cause for r in top]
    taken = []
    for answer in question.answers:
        scores = {r.cause.name: r.score for r in rank(evidence.plus(*question.facts(answer)), causes)}
        taken.append([math.exp(max(-20.0, scores.get(r.cause.name, -math.inf) - r.score)) for r in top])
    likely = [[column[i] for column in taken] for i in range(len(top))]
    given = [[p / sum(row) if sum(row) else 1 / len(row) for p in row] for row in likely]
    overall = [sum(s * row[a] for s, row in zip(shares, given, strict=True)) for a in range(len(taken))]
    return sum(
        s * p * math.log(p / overall[a])
        for s, row in zip(shares, given, strict=True)
        for a, p in enumerate(row)
        if p > 0 and overall[a] > 0
    )

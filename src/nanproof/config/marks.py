"""What a change is worth: nothing, if no code reads the key or something else overrides it."""

from __future__ import annotations

from typing import Literal

from .case import Case
from .checks.np710_dead_key import is_dead
from .meaning import concepts_of
from .proposals import Proposal
from .value import Value, as_number, show

Mark = Literal["", "dead", "inert", "low value"]


def mark(case: Case, proposal: Proposal) -> tuple[Mark, str]:
    """The mark of a change, and why."""
    held = case.settings.get(proposal.key)
    if held is not None and is_dead(held, case.settings, case.project):
        return "dead", f"none of {case.project.reads.files} Python files reads {held.name}"
    if held is None and _nobody_reads(case, proposal.key):
        return "dead", f"none of {case.project.reads.files} Python files reads {proposal.key.rpartition('.')[2]}"
    concepts = {c for c, _ in concepts_of(proposal.key)}
    if held is not None and (later := _overrider(case, held)) is not None:
        return "inert", f"{later.where} overrides it with {show(later.value)}"
    if "clip_norm" in concepts and held is not None and case.adam and _both_bind(held, proposal):
        return "low value", "under Adam a lower limit scales all gradients alike, and Adam divides the scale out again"
    if concepts & {"warmup_steps", "warmup_ratio"} and case.meaning.word("scheduler") in ("constant", "none"):
        return "inert", f"the schedule is {case.meaning.word('scheduler')}, which has no warm-up"
    resumed, after = case.facts.number("resumed_at"), as_number(proposal.after)
    if "warmup_steps" in concepts and resumed is not None and after is not None and resumed > after:
        return "inert", f"the run resumes at step {resumed:,.0f}, after the warm-up"
    restored = case.facts.number("checkpoint_lr")
    if "lr" in concepts and restored is not None and restored != after:
        return "inert", f"the checkpoint restores {restored:g}; start a fresh scheduler, or set base_lrs after loading"
    if "nan_filter" in concepts:
        return "inert", "changes what the log shows, not the training"
    return "", ""


def _nobody_reads(case: Case, key: str) -> bool:
    """A key that is to be added, in a config that only the project's own code reads."""
    own = (
        case.dialect == "plain" and bool(case.project.codes) and case.project.complete and not case.path.endswith(".py")
    )
    own = own and case.effective.stack != "transformers"  # its parser reads every argument
    return own and not case.project.reads.may_read(key)


def _overrider(case: Case, held: Value) -> Value | None:
    """A word on the same thing that counts more, such as a flag on the command line of a launch script."""
    for concept, _ in concepts_of(held.key):
        first = case.meaning.get(concept)
        if first is None or first is held or first.path == case.path:
            continue
        if first.origin in ("command-line", "environment"):
            return first
    return held if held.origin in ("command-line", "environment") and held.path != case.path else None


def _both_bind(held: Value, proposal: Proposal) -> bool:
    before, after = held.number, as_number(proposal.after)
    return before is not None and after is not None and 0 < after < before <= 10

"""A checkpoint that would bring back another learning rate than the config says."""

from __future__ import annotations

from collections.abc import Iterator

from ...records import Finding
from ..check import Check, report
from ..meaning import Meaning
from ..project import Project
from ..value import Settings, as_number


def check(settings: Settings, project: Project) -> Iterator[Finding]:
    meaning = Meaning.of(settings)
    value, lr = meaning.get("lr"), meaning.number("lr")
    restored = as_number(project.facts.get("checkpoint_lr"))
    if value is None or lr is None or restored is None or abs(lr - restored) <= 1e-6 * max(abs(lr), abs(restored)):
        return
    name = project.facts.get("checkpoint", "the checkpoint")
    yield report(
        "NP704",
        value,
        f"{value.label} is {lr:g}, {name} restores {restored:g}: after resuming, {restored:g} is in force",
        "set the rate of the optimizer and the scheduler's base_lrs again after loading, or start a fresh scheduler",
    )


CHECK = Check(
    code="NP704",
    name="lr-vs-checkpoint",
    what="Compares the configured learning rate with the one that the checkpoint to resume from would restore. Needs "
    "the fact `checkpoint_lr`, which `nanproof diagnose` takes from the checkpoint itself.",
    why="`load_state_dict` of optimizer and scheduler brings back the old rate and the old base_lrs. A config lowered "
    "to 1e-4 after a failure then trains at 4.92e-4 again, and fails again.",
    bad="lr: 1.0e-4\nresume_from: epoch_28.pth\n",
    good="lr: 4.92e-4\nresume_from: epoch_28.pth\n",
    facts={"checkpoint_lr": 4.92e-4},
    false_alarm="When the code sets the rate after loading.",
    check=check,
)

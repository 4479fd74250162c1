"""Clipping that never binds, contradicts itself, or is configured and not done."""

from __future__ import annotations

from collections.abc import Iterator

from ...records import Finding
from ..check import Check, report
from ..dialect import dialect_of
from ..meaning import Meaning
from ..project import Project
from ..value import Settings, Value

NEVER = 100.0
_AROUND = ("lr", "optimizer", "epochs", "max_steps", "accumulation", "weight_decay", "batch_size")


def check(settings: Settings, project: Project) -> Iterator[Finding]:
    meaning = Meaning.of(settings)
    value, norm = meaning.get("clip_norm"), meaning.number("clip_norm")
    if value is None or norm is None or value.key.lower().endswith("clip_value"):
        return
    if value.origin not in ("deepspeed", "command-line", "call") and not any(meaning.get(c) for c in _AROUND):
        return  # the limit of an activation, not of a training run
    if norm >= NEVER:
        yield report(
            "NP705",
            value,
            f"{value.label} is {norm:g}: it does not bind before the gradients have exploded",
            "1.0 is usual; better, let a step with an unusual gradient be skipped",
        )
    elif norm < 0:
        yield report("NP705", value, f"{value.label} is {norm:g}", "give a positive number")
    else:
        yield from _contradiction(settings, value, norm)
        yield from _not_done(settings, project, value)


def _contradiction(settings: Settings, value: Value, norm: float) -> Iterator[Finding]:
    tool = settings.get("deepspeed.gradient_clipping")
    if tool is None or tool is value or tool.number is None or tool.number == norm:
        return
    message = f"gradient_clipping is {tool.number:g} for DeepSpeed, {value.label} is {norm:g} ({value.where})"
    yield report("NP705", tool, message, 'write "auto" in the DeepSpeed config')


def _not_done(settings: Settings, project: Project, value: Value) -> Iterator[Finding]:
    """The key is read, but nothing in the code clips."""
    if not project.codes or value.origin in ("call", "deepspeed", "accelerate"):
        return
    if dialect_of(v.key for v in settings) != "plain":
        return
    reads = project.reads
    told = {v.name for v in settings}
    clips = {n for n in reads.mentioned if "clip" in n.lower()} - told
    frameworks = {"Trainer", "Accelerator", "deepspeed", "TrainingArguments", "Fabric", "apex"} & reads.mentioned
    if value.name in reads.mentioned and not clips and not frameworks and "backward" in reads.mentioned:
        yield report(
            "NP705",
            value,
            f"{value.label} is {value.text}, but none of {reads.files} Python files clips a gradient",
            "call torch.nn.utils.clip_grad_norm_ between backward (and unscale_) and step",
        )


CHECK = Check(
    code="NP705",
    name="clip-without-effect",
    what="Reports a gradient-norm limit of 100 and more, a limit that DeepSpeed and the trainer disagree on, "
    "and a limit that the code reads without clipping anywhere. That no limit is set at all is not reported: the HF "
    "trainers clip at 1.0 by default, and many models train well without.",
    why="A limit far above the usual norm (0.1 to 10) never binds until the gradient is already Inf, and clipping an "
    "infinite norm turns every gradient into NaN or 0.",
    bad="lr: 1.0e-4\nmax_grad_norm: 1000\n",
    good="lr: 1.0e-4\nmax_grad_norm: 1.0\n",
    false_alarm="Losses that are summed over many elements have large norms, and then a limit above 100 can bind.",
    check=check,
)

"""A setting that no code reads."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from ...records import Finding
from ..check import Check, report
from ..dialect import dialect_of
from ..meaning import concepts_of
from ..project import Project
from ..value import Settings, Value

_WEIGHT = re.compile(r".*(loss|latent|kl|reg|aux).*(weight|lambda|coef|scale)|(weight|lambda|coef)_.*", re.I)
_OWN_READERS = {"HfArgumentParser", "TrlParser", "LightningCLI", "parse_dict", "instantiate", "set_defaults"}


def is_dead(value: Value, settings: Settings, project: Project) -> bool:
    """Whether no line of the project's code can read this key; False as soon as that is not sure."""
    reads = project.reads
    if value.origin not in ("yaml", "json", "toml") or not project.codes or not project.complete:
        return False
    if _OWN_READERS & reads.mentioned or _in_framework(project):
        return False
    if dialect_of(v.key for v in settings) not in ("plain", "hydra") or reads.may_read(value.key):
        return False
    section = value.key.rpartition(".")[0]
    if any(
        f"{'.'.join(section.split('.')[: i + 1])}._target_".lstrip(".") in settings
        for i in range(section.count(".") + 1)
    ):
        return False
    names = {v.name for v in settings if v.path == value.path and not v.name.isdecimal()}
    read = {n for n in names if n in reads.mentioned or n.replace("-", "_") in reads.mentioned}
    return len(read) >= 3 and len(read) >= len(names) / 2  # else this code has nothing to do with this config


def _in_framework(project: Project) -> bool:
    """Whether the project derives classes from a package that may read the config itself."""
    return bool(project.reads.packages - sys.stdlib_module_names - {"torch", "torchvision", "torchaudio"})


def check(settings: Settings, project: Project) -> Iterator[Finding]:
    for value in settings:
        if (concepts_of(value.key) or _WEIGHT.fullmatch(value.name)) and is_dead(value, settings, project):
            yield report(
                "NP710",
                value,
                f"{value.label} is read by no code: none of {project.reads.files} Python files names {value.name}",
                "remove it, or make the code read it; changing it does nothing",
            )


CHECK = Check(
    code="NP710",
    name="dead-key",
    what="Reports a setting about training (rates, clipping, accumulation, warm-up, precision, loss weights) that no "
    "Python file of the project can read: its name occurs nowhere as attribute, key, parameter, keyword or string, and "
    "no section around it is handed on whole (`**cfg.section`, `instantiate`, a loop over its items).",
    why='A key that nobody reads looks like a decision and is none. Accumulating over 2 steps "for stability" through '
    "such a key trains exactly as before.",
    bad="lr: 1.0e-4\nbatch_size: 32\nepochs: 10\ngradient_accumulation_steps: 2\n",
    good="lr: 1.0e-4\nbatch_size: 32\nepochs: 10\n",
    beside="import yaml\n\ncfg = yaml.safe_load(open('config.yaml'))\n"
    "train(lr=cfg['lr'], batch_size=cfg['batch_size'], epochs=cfg['epochs'])\n",
    false_alarm="When a program outside of the project reads the file.",
    check=check,
)

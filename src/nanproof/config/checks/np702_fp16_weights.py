"""Weights that are themselves float16 and are trained."""

from __future__ import annotations

from collections.abc import Iterator

from ...records import Finding
from ..check import Check, report
from ..contradictions import find_problems
from ..effective import find_effective
from ..meaning import Meaning
from ..project import Project
from ..value import Settings


def check(settings: Settings, project: Project) -> Iterator[Finding]:
    found = find_effective(settings, project)
    for problem in find_problems(found, Meaning.of(settings), project):
        written = problem.value is not None and problem.value.origin != "call"  # code alone is the business of lint
        if problem.code == "NP702" and written:
            assert problem.value is not None
            yield report("NP702", problem.value, problem.message, problem.help)


CHECK = Check(
    code="NP702",
    name="fp16-weights",
    what="Reports a model that is loaded or kept in float16 and trained there, without float32 master weights, LoRA or "
    "quantization.",
    why="An update below half a unit in the last place is lost: a weight of 0.1 in float16 moves in steps of 6e-05, so "
    "updates under 3e-05 vanish. Adam's eps of 1e-08 is 0 in float16, and 0/0 is NaN. GradScaler refuses float16 "
    "gradients outright.",
    bad="torch_dtype: float16\nfp16: true\nlearning_rate: 2.0e-5\nper_device_train_batch_size: 4\n",
    good="torch_dtype: float32\nfp16: true\nlearning_rate: 2.0e-5\nper_device_train_batch_size: 4\n",
    false_alarm="When the optimizer keeps float32 master weights of its own.",
    check=check,
)

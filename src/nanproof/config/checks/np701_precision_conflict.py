"""Sources of precision that contradict each other."""

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
        if problem.code == "NP701" and problem.value is not None and problem.value.origin != "call":
            yield report("NP701", problem.value, problem.message, problem.help)


CHECK = Check(
    code="NP701",
    name="precision-conflict",
    what="Puts every source of precision side by side (trainer flags, accelerate, DeepSpeed, Lightning, `autocast` and "
    "`GradScaler` in the code, the GPU) and reports where one silently overrides another, where two exclude each "
    "other, and where float16 ends up without a loss scaler.",
    why="The innermost word counts. `autocast` without a dtype is float16 on cuda, whatever accelerate's config says: "
    "values above 65504 become Inf and gradients below 6e-08 become 0, and without a scaler nobody notices. A flag "
    "called amp says nothing about the format in force.",
    bad="trainer:\n  amp: true\n  lr: 5.0e-5\n",
    good="trainer:\n  amp: false\n  lr: 5.0e-5\n",
    beside="import torch\n\n\ndef step(self, batch):\n    with torch.autocast('cuda', enabled=self.amp):\n"
    "        loss = self.model(batch)\n    loss.backward()\n    self.optimizer.step()\n",
    false_alarm="When a GradScaler lives in a package outside of the project.",
    check=check,
)

"""Adam on a transformer, from scratch, at full rate from the first step."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ...records import Finding
from ..check import Check, report
from ..meaning import Meaning
from ..optimizers import is_adam, optimizer_of
from ..project import Project
from ..value import Settings

RATE = 3e-4
_TRANSFORMER = re.compile(
    r"(^|[._])(n_?heads?|num_heads|num_attention_heads|n_layers?|num_hidden_layers|d_model|attention_heads|"
    r"transformer|gpt|llama|bert|vit|dit|t5|encoder_layers)([._]|$)"
)
_WARM = re.compile(r"one_?cycle|warm|noam", re.I)


def check(settings: Settings, project: Project) -> Iterator[Finding]:
    meaning = Meaning.of(settings)
    lr = meaning.number("lr")
    given = [v for c in ("warmup_steps", "warmup_ratio", "warmup_epochs") for v in meaning.all(c)[:1]]
    if lr is None or lr < RATE or not given or any(v.number is None or v.number > 0 for v in given):
        return
    if _WARM.search(meaning.word("scheduler")) or not is_adam(optimizer_of(settings, meaning)):
        return
    keys = " ".join(v.key.lower() for v in settings)
    words = " ".join(str(v.value).lower() for v in settings if isinstance(v.value, str) and len(v.value) < 60)
    if not any(_TRANSFORMER.search(k) for k in keys.split()) and not re.search(
        r"transformer|gpt|llama|bert|vit", words
    ):
        return
    yield report(
        "NP706",
        given[0],
        f"{given[0].label} is 0 while Adam starts at lr {lr:g} on a transformer",
        "warm up over 1 to 5 % of the steps, 2,000 at most",
    )


CHECK = Check(
    code="NP706",
    name="no-warmup",
    what="Reports a warm-up that is set to 0 for a transformer trained with Adam at 3e-4 or more.",
    why="In the first steps Adam's second moment rests on a handful of gradients: after one step the update is lr "
    "times the sign of the gradient, for every weight, however small its gradient. Warm-up keeps those steps short.",
    bad="optimizer: adamw\nlr: 6.0e-4\nwarmup_steps: 0\nn_head: 12\n",
    good="optimizer: adamw\nlr: 6.0e-4\nwarmup_steps: 2000\nn_head: 12\n",
    false_alarm="When training continues from a checkpoint with its optimizer state.",
    check=check,
)

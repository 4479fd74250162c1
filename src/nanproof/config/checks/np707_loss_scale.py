"""Loss scales that cannot work."""

from __future__ import annotations

from collections.abc import Iterator

from ...records import Finding
from ..check import Check, report
from ..meaning import Meaning, is_on
from ..project import Project
from ..value import Settings

HIGHEST_POWER = 24
SHORTEST_WINDOW = 10


def check(settings: Settings, project: Project) -> Iterator[Finding]:
    meaning = Meaning.of(settings)
    if any(is_on(v) for v in meaning.all("bf16")) and not any(is_on(v) for v in meaning.all("fp16")):
        for key in settings:
            if key.key.removeprefix("deepspeed.").startswith("bf16.") and "scale" in key.name:
                yield report(
                    "NP707",
                    key,
                    f"{key.label} does nothing: bf16 has the range of float32 and is not scaled",
                    "take the key out, or put it under fp16",
                )
        return
    if not any(is_on(v) for v in meaning.all("fp16")):
        either = [str(v.value) == "auto" for name in ("fp16", "bf16") for v in meaning.all(name)]
        if either != [True]:
            return  # off, or the command line chooses between the two
    value, scale = meaning.get("loss_scale"), meaning.number("loss_scale")
    if value is not None and scale == 1:
        yield report(
            "NP707",
            value,
            f"{value.label} is 1: in float16, gradients below 6e-08 become 0",
            "0 asks DeepSpeed for dynamic scaling",
        )
    elif value is not None and scale is not None and scale > 65504:
        yield report(
            "NP707",
            value,
            f"{value.label} is fixed at {scale:g}, above the largest float16 number, 65504",
            "0 asks DeepSpeed for dynamic scaling",
        )
    start, power = meaning.get("initial_scale"), meaning.number("initial_scale")
    if start is not None and power is not None and start.name == "initial_scale_power" and power > HIGHEST_POWER:
        yield report(
            "NP707",
            start,
            f"{start.label} is {power:g}: the first {power - 16:.0f} steps or so overflow and are skipped",
            "16 is the default",
        )
    window, steps = meaning.get("growth_interval"), meaning.number("growth_interval")
    if window is not None and steps is not None and 0 < steps < SHORTEST_WINDOW:
        yield report(
            "NP707",
            window,
            f"{window.label} is {steps:g}: the scale doubles so often that steps overflow all the time",
            "1000 (DeepSpeed) and 2000 (torch) are the defaults",
        )


CHECK = Check(
    code="NP707",
    name="loss-scale",
    what="With float16, reports a fixed loss scale of 1 or above 65504, an initial power above 24, and a growth "
    "window below 10 steps; with bfloat16, loss-scale keys that nobody reads.",
    why="Scaling exists to lift gradients over 6e-08, the smallest float16 number, without passing 65504. A fixed 1 "
    "lifts nothing; a fixed scale above 65504 overflows by itself; one that doubles every few steps overflows every "
    "few steps, and each overflow is a skipped step.",
    bad="fp16:\n  enabled: true\n  loss_scale: 1\nzero_optimization:\n  stage: 2\n",
    good="fp16:\n  enabled: true\n  loss_scale: 0\nzero_optimization:\n  stage: 2\n",
    false_alarm="When gradients are known to be large and never underflow.",
    check=check,
)

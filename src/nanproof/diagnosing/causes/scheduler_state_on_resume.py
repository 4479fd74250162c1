"""The checkpoint brought its own learning rate."""

from __future__ import annotations

from ..cause import Cause, Exclusion, Remedy
from ..clue import about, both, con, either, flag, onset, pro, value
from ..signs import RESUMED

CAUSE = Cause(
    name="scheduler-state-on-resume",
    title="the resumed scheduler or optimizer state overrides your learning rate",
    what="""``optimizer.load_state_dict`` and ``scheduler.load_state_dict`` bring back the rates of the old run:
base_lrs, last_epoch, the peak of a OneCycle. A changed config then has no effect; or the scheduler is built again
without last_epoch and begins at the peak; or it is built after the optimizer was loaded and takes a decayed rate
for the base. In all cases the rate in force is not the configured one.""",
    share=5.0,
    clues=(
        pro("names", flag("lr-discontinuity"), "the learning rate leaves its schedule"),
        pro("suggests", both(flag("lr-discontinuity"), RESUMED), "at a resume"),
        pro("names", flag("config-change-ignored"), "a change of the config had no effect"),
        pro("proves", value("lr-in-checkpoint"), "the checkpoint restores another rate than the config asks for"),
        pro("names", value("lr-in-force"), "the rate in force is not the configured one"),
        pro(
            "points",
            both(RESUMED, about("learning-rate", "schedule")),
            "the report mentions a resume, and the rate or schedule",
            unless=flag("lr-continuous"),
        ),
        pro("names", both(flag("lr-negative"), RESUMED), "the learning rate is negative after a resume"),
        pro("points", flag("lr-negative"), "the learning rate is negative"),
        pro("points", both(flag("scheduler-rebuilt"), RESUMED), "the scheduler is rebuilt on resume"),
        pro("suggests", flag("scheduler-rebuilt"), "the scheduler is rebuilt without its position"),
        pro("suggests", flag("spike-at-each-resume"), "the loss jumps at each resume"),
        pro("suggests", onset("after-resume", "early-after-restart"), "it began after a resume"),
        pro("hints", about("resuming"), "a resume is part of the report"),
        pro("suggests", both(about("schedule"), about("resuming")), "the report mentions the schedule and a resume"),
        pro("points", value("lint", "NP502"), "the code overrides the rate on resume"),
        con("points", flag("nan-since-load"), "a rate breaks nothing before the first update"),
        con("points", flag("lr-continuous"), "the learning rate is continuous across the resume"),
        con("suggests", flag("nan-weights", "checkpoint-nonfinite"), "the weights were NaN already"),
        con("suggests", about("switched-off"), "switching a component off cures it"),
        con("hints", flag("loss-scale-collapse", "restart-gains-100-steps"), "the restarts follow the failure"),
    ),
    excluded=(
        Exclusion(when=either(flag("never-resumed"), onset("before-training")), says="the run was never resumed"),
    ),
    remedies=(
        Remedy(
            does="do not count the resumed epochs twice: pass last_epoch to the scheduler or restore its state, never "
            "both",
            when=flag("lr-negative"),
        ),
        Remedy(
            does="resume the model and optimizer but build a fresh scheduler with last_epoch set, and set "
            "param_groups[i]['lr'] and ['initial_lr'] after loading"
        ),
    ),
    verify="The first logged learning rate after the resume equals the one that the config gives for that step.",
)

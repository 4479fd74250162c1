"""The checkpoint brought its own learning rate."""

from __future__ import annotations

from ..cause import Cause, Exclusion, Remedy
from ..clue import HINTS, NAMES, POINTS, PROVES, SUGGESTS, about, both, con, either, flag, onset, pro, value
from ..signs import RESUMED

CAUSE = Cause(
    name="scheduler-state-on-resume",
    title="the checkpoint's scheduler or optimizer state overrode your learning rate",
    what="""``optimizer.load_state_dict`` and ``scheduler.load_state_dict`` bring back the rates of the old run:
base_lrs, last_epoch, the peak of a OneCycle. A changed config then has no effect; or the scheduler is built anew
without last_epoch and begins at the peak; or it is built after the optimizer was loaded and takes a decayed rate
for the base. In all cases the rate in force is not the configured one.""",
    share=5.0,
    clues=(
        pro(NAMES, flag("lr-discontinuity"), "the learning rate jumps"),
        pro(NAMES, flag("config-change-ignored"), "a change of the config had no effect"),
        pro(PROVES, value("lr-in-checkpoint"), "the checkpoint restores another rate than the config asks for"),
        pro(NAMES, value("lr-in-force"), "the rate in force is not the configured one"),
        pro(
            POINTS,
            both(RESUMED, about("learning-rate", "schedule")),
            "a resume, and the rate or schedule is spoken of",
            unless=flag("lr-continuous"),
        ),
        pro(SUGGESTS, flag("spike-at-each-resume"), "the loss jumps at each resume"),
        pro(SUGGESTS, onset("after-resume", "early-after-restart"), "it began after a resume"),
        pro(HINTS, about("resuming"), "a resume is part of the story"),
        pro(SUGGESTS, both(about("schedule"), about("resuming")), "the schedule and a resume are spoken of"),
        pro(POINTS, value("lint", "NP502"), "the code overrides the rate on resume"),
        con(POINTS, flag("lr-continuous"), "the learning rate is continuous across the resume"),
        con(SUGGESTS, flag("nan-weights", "checkpoint-nonfinite"), "the weights were NaN already"),
        con(SUGGESTS, about("switched-off"), "switching a component off cures it"),
        con(HINTS, flag("loss-scale-collapse", "restart-gains-100-steps"), "the restarts follow the failure"),
    ),
    excluded=(
        Exclusion(when=either(flag("never-resumed"), onset("before-training")), says="the run was never resumed"),
    ),
    remedies=(
        Remedy(
            does="nanproof harden {config} --set lr={lr-wanted} ; resume with a fresh scheduler, or load only the "
            "model from {checkpoint}",
            when=value("lr-wanted"),
        ),
        Remedy(
            does="resume the model and optimizer but make a fresh scheduler with last_epoch set, and set "
            "param_groups[i]['lr'] and ['initial_lr'] after loading; nanproof scan {checkpoint} --config "
            "{config} shows what it would restore"
        ),
    ),
    verify="The first logged learning rate after the resume equals the one that the config gives for that step.",
)

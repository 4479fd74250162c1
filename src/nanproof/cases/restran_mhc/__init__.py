"""ResTran with mHC in miniature: licence plates, ResNet blocks under hyper-connections, CTC, OneCycleLR, a GradScaler.

Every block reads its input out of n streams with sigmoids, which sum to n/2, and adds its own shortcut: with four
streams a feature map more than doubles from block to block, and is above 10,000 at the first step. While the learning
rate rises to its peak, and the plates are learned, it passes float16's 65,504. BatchNorm's running statistics
take the Inf in, the scaler leaves out every step and halves its scale, the parameters stay finite.

| config | |
|---|---|
| ``original`` | four streams: dies on the way to the peak of the learning rate |
| ``advised`` | the same with the clamps and the eps of its post-mortem: dies |
| ``resumed`` | a lower learning rate in the config, and a checkpoint that brings the old one along |
| ``safe`` | two streams, whose sigmoids sum to 1, and a lower learning rate: survives |
| ``stable`` | four streams, a convex read-out and streams that really mix |
"""

from __future__ import annotations

from ..catalogue import Case, Change, Requirement

_MODULE = "nanproof.cases.restran_mhc.train"
_TRAIN = f"python -m {_MODULE}"
_RUN = f"nanproof run --run-dir runs/guard -m {_MODULE}"
_TESTS = "pytest tests/cases/test_restran_mhc.py"

CASE = Case(
    name="restran-mhc",
    title="plate recognition under hyper-connections (mHC); feature maps that double per block leave float16's range",
    within=120,
    cause="fp16-overflow",
    mechanism="range-overflow",
    step="nanproof.cases.restran_mhc.train:make_step",
    code=("model.py", "train.py"),
    changes=(
        Change(
            before="read-out by sigmoids",
            after="read-out by softmax",
            why="n sigmoids sum to n/2, so that four streams double the map in every block; a softmax is an average",
        ),
        Change(
            before="a shortcut in the block and one around it",
            after="the hyper-connection is the only shortcut",
            why="two shortcuts add the same map twice",
        ),
        Change(
            before='einsum "bnn,bnchw->bnchw"',
            after='einsum "bij,bjchw->bichw"',
            why="an index that stands twice takes the diagonal: the streams were scaled by about 1/n and never mixed",
        ),
        Change(
            before="n equal copies made in each block, averaged at its end",
            after="n streams carried from the stem to the last block",
            why="mixing equal copies does nothing, and gives the gate of the mixing no gradient",
        ),
        Change(
            before="Sinkhorn on exp",
            after="Sinkhorn in log space (nanproof.ops.sinkhorn)",
            why="exp passes float16's maximum above 11.09 and float32's above 88.7; logarithms do not",
        ),
        Change(
            before="streams are cast to float16 for the read-out",
            after="read-out and mixing in float32, convolutions in float16",
            why="what adds up over the depth needs the range; what is normalized after each step does not",
        ),
        Change(
            before="RMSNorm eps 1e-20",
            after="1e-6",
            why="beside the square of any activation 1e-20 is nothing, and an empty map would be divided by 1e-10",
        ),
        Change(
            before="a checkpoint brings its learning rate and schedule along",
            after="it brings moments and the place in the schedule; rate and shape are the config's",
            why="otherwise a lower learning rate in the config is never in force",
        ),
        Change(
            before="a NaN loss goes on to BatchNorm's statistics and the next checkpoint",
            after="it ends the run before anything is saved",
            why="skipping cannot help: the next batch overflows too",
        ),
    ),
    requirements=(
        Requirement(
            number="D1",
            wish="checks inside the forward at five places, with shape, NaN and Inf counts, finite range and alpha",
            shown_by=f"{_RUN} ; nanproof report runs/guard ; {_TESTS}::test_the_incident_lists_the_five_taps",
        ),
        Requirement(
            number="D2",
            wish="parameters, batch, prediction, gradients, loss checked; a named error before anything bad is saved",
            shown_by=f"nanproof run --policy strict -m {_MODULE} ; {_TESTS}::test_nothing_bad_is_saved_under_the_guard",
        ),
        Requirement(
            number="D3",
            wish="diagnose: config, corrupted checkpoints, a fresh model, alphas, what to do",
            shown_by="nanproof diagnose runs/restran-mhc-original-0 ; "
            f"nanproof diagnose --model {_MODULE}:fresh_model --batch {_MODULE}:fresh_batch --watch-params '*alpha*'",
        ),
        Requirement(
            number="D4",
            wish="the learning rate in force against the config's; schedules that a checkpoint brings back",
            shown_by=f"{_TRAIN} --config-name resumed ; nanproof diagnose runs/restran-mhc-resumed-0",
        ),
        Requirement(
            number="D5",
            wish="corrupted checkpoints set aside; the causal chain: when, which layer, the values before",
            shown_by="nanproof scan runs/restran-mhc-original-0/checkpoints --quarantine runs/bad ; "
            f"nanproof locate runs/guard --step {_MODULE}:make_step",
        ),
        Requirement(
            number="D6",
            wish="safe settings and a staged scale-up of n, with health criteria per stage and fall-backs",
            shown_by=f"{_TRAIN} --config-name safe ; "
            "nanproof rollout src/nanproof/cases/restran_mhc/rollout.yaml --out runs/rollout",
        ),
        Requirement(
            number="D7",
            wish="the risky operations named: RMSNorm's eps, exp in Sinkhorn, the einsum, the growth of alpha",
            shown_by="nanproof lint src/nanproof/cases/restran_mhc ; nanproof harden "
            "src/nanproof/cases/restran_mhc/configs/original.yaml --diff ; nanproof watch runs/restran-mhc-original-0",
        ),
    ),
)

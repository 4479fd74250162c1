"""MM-LDLM in miniature: a diffusion transformer that writes text from latents, and streams that nobody watched.

The real one had 892M parameters in pure bfloat16 and hyper-connections: several residual streams, mixed by a learned
matrix before every sublayer. Nothing bounds those matrices, so they multiply along the depth. LayerNorm takes the scale
out again, so neither the loss nor the gradient norm shows anything, until the square of a stream is too large for
float32. From then on every gradient is NaN. The original zeroes such gradients and steps anyway; its weights stay
finite and no checkpoint looks bad; the real one went on like this for 98,000 steps.

The miniature has the same parts: joint attention over text and latents, qk-norm, adaLN, hyper-connections, ``l2t`` and
``t2l``, bfloat16. Its texts and latents are made by a fixed random map, and it is trained by one process or several.
"""

from ..catalogue import Case, Change, Requirement

_TRAIN = "nanproof.cases.mm_ldlm.train"
_TESTS = "pytest tests/cases/test_mm_ldlm.py"

CASE = Case(
    name="mm-ldlm",
    title="a text diffusion transformer: residual streams grow unseen until LayerNorm's variance overflows",
    within=50,
    cause="arch-instability",
    mechanism="range-overflow",
    step=f"{_TRAIN}:make_step",
    code=("model.py", "losses.py", "train.py", "setup.py"),
    changes=(
        Change(
            before="mixing matrices without bounds",
            after="doubly stochastic ones, by Sinkhorn in log space",
            why="a product of them has norm 1, whatever the depth; in log space no exp can overflow",
        ),
        Change(
            before="any read-out and write-in",
            after="convex read-out (softmax), write-in below 2 (sigmoid)",
            why="a sublayer sees a mean of the streams and adds at most twice its output",
        ),
        Change(
            before="LayerNorm as E[x²] − E[x]²",
            after="F.layer_norm, about the mean",
            why="no difference of two large squares",
        ),
        Change(
            before="sublayers at full strength from the start",
            after="gates start at zero (adaLN-Zero)",
            why="depth adds nothing until it has learned something to add",
        ),
        Change(
            before="weights and streams in bfloat16",
            after="float32 weights and streams, bfloat16 autocast",
            why="an update of less than 1/256 of a bfloat16 weight is rounded away",
        ),
        Change(
            before="latents as they come: mean 30, deviation 25",
            after="standardised with the data's own statistics",
            why="near 1 for the network, and lengths still mean something",
        ),
        Change(
            before="(loss · mask).sum() / mask.sum()",
            after="ops.masked_cross_entropy",
            why="selects instead of multiplying; nothing hidden is 0, not 0/0",
        ),
        Change(
            before="isnan(norm) after clipping, gradients zeroed, step anyway",
            after="isfinite before clipping, on all ranks, whole step left out, end after five in a row",
            why="Adam moves by its momentum without gradients; bad weights do not heal by skipping",
        ),
        Change(
            before="accumulate_batches, which no code reads",
            after="the same batch size, and a learning rate that decays",
            why="a key without a reader changes nothing: nanproof harden calls it dead",
        ),
    ),
    requirements=(
        Requirement(
            number="A1",
            wish="loss and gradients checked before they do harm, bad steps left out whole, with reasons",
            shown_by=f"nanproof run -m {_TRAIN} ; {_TESTS}::test_the_guarded_original_ends_with_finite_weights",
        ),
        Requirement(
            number="A2",
            wish="losses that cannot divide by zero, latents normalized, every loss component checked",
            shown_by=f"{_TESTS} -k 'division_by_zero or lengths'",
        ),
        Requirement(
            number="A3",
            wish="a stable config beside the original; names, dotted overrides, environment variables",
            shown_by=f"OPTIMIZER_LR=2e-3 python -m {_TRAIN} --config-name stable training.save_every=5",
        ),
        Requirement(
            number="A4",
            wish="an automatic patcher that leaves the originals alone, and both side by side",
            shown_by="nanproof lint src --unsafe-fixes --beside ; nanproof harden original.yaml --conservative ; "
            "nanproof case mm-ldlm --compare",
        ),
        Requirement(
            number="A5",
            wish="a launcher that needs no change of code, plain torchrun, a shell script",
            shown_by=f"nanproof run --nproc 2 -m {_TRAIN} ; torchrun --nproc-per-node 2 -m {_TRAIN} ; "
            "NPROC_PER_NODE=2 sh src/nanproof/cases/mm_ldlm/train.sh --config-name stable",
        ),
        Requirement(
            number="A6",
            wish="a rollout in stages, each with its gates",
            shown_by="nanproof rollout src/nanproof/cases/mm_ldlm/rollout.yaml --out runs/rollout",
        ),
        Requirement(
            number="A7",
            wish="live monitoring, a training_log.jsonl for each run, the loss curve as a picture",
            shown_by="nanproof watch runs/mm-ldlm-stable-0 ; nanproof report runs/mm-ldlm-stable-0 -o loss.png",
        ),
        Requirement(
            number="A8",
            wish="what to do when it persists: lower rates, float32, data scanned, an earlier checkpoint",
            shown_by="nanproof harden original.yaml --escalate 4 ; nanproof diagnose --data data/ ; "
            f"python -m {_TRAIN} training.dtype=float32 --resume runs/mm-ldlm-original-0/checkpoints/step_000010.pt",
        ),
        Requirement(
            number="A9",
            wish="a write-up: causes, what changed and why, prevention, next steps",
            shown_by="nanproof diagnose runs/mm-ldlm-original-0 --markdown ; nanproof case mm-ldlm --compare --page "
            "docs/cases/mm-ldlm.md",
        ),
    ),
)

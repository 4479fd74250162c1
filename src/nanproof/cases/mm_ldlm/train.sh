#!/bin/sh
# Train under the guard, set by the environment as its users were used to:
#   NNODES=1 NPROC_PER_NODE=2 OPTIMIZER_LR=5e-3 GRAD_CLIP_NORM=1.0 sh train.sh --config-name stable
exec nanproof run -m nanproof.cases.mm_ldlm.train "$@"

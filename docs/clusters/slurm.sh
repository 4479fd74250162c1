#!/bin/bash
# One task per machine; torchrun starts the rest. Submit with: sbatch slurm.sh
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --requeue

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" \
  -m nanproof run --run-dir "$SCRATCH/runs/$SLURM_JOB_ID" train.py --resume auto

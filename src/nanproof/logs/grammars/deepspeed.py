"""DeepSpeed's own report of steps: how many were skipped, and the learning rate in force. Its overflows are messages."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="deepspeed",
        needle=b"skipped=",
        line=rb"\bstep=(?P<step>\d{1,18}), (?P<rest>skipped=.*)",
        sample="[2024-01-02 03:04:05,678] [INFO] [logging.py:96:log_dist] [Rank 0] step=40, skipped=3, lr=[1.0e-05], mom=[(0.9, 0.95)]",
    ),
    Grammar(
        name="deepspeed-loss",
        needle=b"loss:",
        line=rb"\bsteps: (?P<step>\d{1,18}) (?P<rest>loss: .*)",
        sample="steps: 10 loss: 10.9187 iter time (s): 1.234 samples/sec: 12.966",
    ),
)

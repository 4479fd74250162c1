"""DeepSpeed's report of steps: how many were skipped, and the learning rate in force. Its overflows are messages."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="deepspeed",
        needle=b"skipped=",
        line=r"\bstep=<step>, (?=skipped=)<rest>",
        sample="[2024-01-02 03:04:05,678] [INFO] [logging.py:96:log_dist] [Rank 0] step=40, skipped=3, lr=[nan]",
    ),
    Grammar(
        name="deepspeed-loss",
        needle=b"steps: ",
        line=r"\bsteps: <step> (?=loss: )<rest>",
        sample="steps: 10 loss: nan iter time (s): 1.234 samples/sec: 12.966",
    ),
)

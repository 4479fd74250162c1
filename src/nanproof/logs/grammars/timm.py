"""timm, DeiT, MAE and the many trainers written after them: an epoch from 0, the place within it in brackets."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="timm",
        needle=b"Train:",
        line=r"\bTrain: +<epoch> +\[\s*<inside>/\s*<length>[^\]]{0,40}\]<rest>",
        sample="Train: 3 [  50/5004 (  1%)]  Loss: nan (nan)  Time: 0.412s (0.430s, ...)  LR: 5.000e-04  Data: 0.011",
    ),
    Grammar(
        name="deit",
        needle=b"Epoch",
        line=r"\bEpoch:?\s*\[<epoch>\]\s*\[\s*<inside>/\s*<length>\]<rest>",
        sample="Epoch: [165]  [ 300/ 351]  eta: 0:00:49  lr: 0.000236  loss: nan (nan)  time: 0.99  max mem: 48596",
    ),
    Grammar(
        name="swin",
        needle=b"Train:",
        line=r"\bTrain: \[<epoch>/\d+\]\[\s*<inside>/\s*<length>\]<rest>",
        sample="[2021-01-01 00:00:00 swin](main.py 200): INFO Train: [5/300][100/1251]\tlr 0.0001\tloss nan (nan)",
    ),
    Grammar(
        name="timm-test",
        needle=b"Test",
        line=r"\bTest(?: \([^)]{0,20}\))?:\s*\[\s*\d+/\s*\d+\]<rest>",
        judged="",
        sample="Test: [  78/78]  Time: 0.123 (0.200)  Loss:  nan (nan)  Acc@1:  0.100 ( 0.100)",
    ),
)

"""timm, DeiT, MAE and the many trainers written after them: an epoch from 0, the place within it in brackets."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="timm",
        needle=b"Train:",
        line=rb"\bTrain: {1,9}(?P<epoch>\d{1,9}) {1,9}\[\s{0,9}(?P<inside>\d{1,15})/\s{0,9}(?P<length>\d{1,15})[^\]]{0,40}\](?P<rest>.*)",
        sample="Train: 3 [  50/5004 (  1%)]  Loss: nan (nan)  Time: 0.412s (0.430s, ...)  LR: 5.000e-04  Data: 0.011 (0.020)",
    ),
    Grammar(
        name="deit",
        needle=b"Epoch",
        line=rb"\bEpoch:?\s{0,9}\[(?P<epoch>\d{1,9})\]\s{0,9}\[\s{0,9}(?P<inside>\d{1,15})/\s{0,9}(?P<length>\d{1,15})\](?P<rest>.*)",
        sample="Epoch: [165]  [ 300/ 351]  eta: 0:00:49  lr: 0.000236  loss: nan (nan)  time: 0.99  data: 0.002  max mem: 48596",
    ),
    Grammar(
        name="timm-test",
        needle=b"Test",
        line=rb"\bTest(?: \([^)]{0,20}\))?:\s{0,9}\[\s{0,9}\d{1,15}/\s{0,9}\d{1,15}\](?P<rest>.*)",
        judged=rb"",
        sample="Test: [  78/78]  Time: 0.123 (0.200)  Loss:  nan (nan)  Acc@1:  0.100 ( 0.100)",
    ),
)

"""mmdet, mmseg, mmengine …: epochs from 1, the place within one in brackets."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="mm-epoch",
        needle=b"Epoch",
        line=rb"\bEpoch ?(?:\((?:train|val|test)\))?\s{0,9}\[(?P<epoch>\d{1,9})\]\s{0,3}\[\s{0,9}(?P<inside>\d{1,15})/(?P<length>\d{1,15})\](?P<rest>.*)",
        judged=rb"Epoch ?\((?:val|test)\)",
        epochs_from=1,
        sample="2020-07-13 23:04:17,373 - mmdet - INFO - Epoch [1][150/294]  lr: 5.000e-03, eta: 1:11:27, loss_bbox: nan, loss: nan, grad_norm: 12.1",
    ),
    Grammar(
        name="mm-iter",
        needle=b"Iter",
        line=rb"\bIter ?(?:\((?:train|val|test)\))?\s{0,9}\[\s{0,9}(?P<step>\d{1,15})/\s{0,9}(?P<last>\d{1,15})\](?P<rest>.*)",
        judged=rb"Iter ?\((?:val|test)\)",
        sample="2023/06/09 23:47:22 - mmengine - INFO - Iter(train) [ 50/80000]  lr: 9.9e-03  time: 0.4  decode.loss_ce: nan  loss: nan",
    ),
)

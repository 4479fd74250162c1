"""mmdet, mmseg, mmengine …: epochs from 1, the place within one in brackets."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="mm-epoch",
        needle=b"Epoch",
        line=r"\bEpoch ?(?:\((?:train|val|test)\))?\s*\[<epoch>\]\s?\[\s*<inside>/<length>\]<rest>",
        judged=r"Epoch ?\((?:val|test)\)",
        epochs_from=1,
        sample="2020-07-13 23:04:17,373 - mmdet - INFO - Epoch [1][150/294]  lr: 5.000e-03, loss_bbox: nan, loss: nan",
    ),
    Grammar(
        name="mm-iter",
        needle=b"Iter",
        line=r"\bIter ?(?:\((?:train|val|test)\))?\s*\[\s*<step>/\s*<last>\]<rest>",
        judged=r"Iter ?\((?:val|test)\)",
        sample="2023/06/09 23:47:22 - mmengine - INFO - Iter(train) [ 50/80000]  decode.loss_ce: nan  loss: nan",
    ),
)

"""ESPnet and WeNet: the epoch, and the batches within it."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="espnet",
        needle=b"epoch:train:",
        line=r"\b<epoch>epoch:train:\d+-<inside>batch:<rest>",
        sample="[host] 2021-01-01 00:01:00,000 (trainer:672) INFO: 1epoch:train:101-200batch: loss_ctc=inf, loss=nan",
    ),
    Grammar(
        name="wenet",
        needle=b" Batch ",
        line=r"\b(?:TRAIN|CV) Batch <epoch>/<inside> <rest>",
        judged=r"\bCV Batch ",
        sample="2024-08-12 10:12:12,301 DEBUG TRAIN Batch 0/100 loss nan acc 0.410121 lr 0.00000400 rank 0",
    ),
)

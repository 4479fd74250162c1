"""ESPnet: the epoch, and a range of batches within it."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="espnet",
        needle=b"epoch:train:",
        line=r"\b<epoch>epoch:train:\d+-<inside>batch:<rest>",
        sample="[host] 2021-01-01 00:01:00,000 (trainer:672) INFO: 1epoch:train:101-200batch: loss_ctc=inf, loss=nan",
    ),
)

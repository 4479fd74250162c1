"""OLMo: the step in brackets, its values behind it or below it."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="olmo",
        needle=b"[step=",
        line=r"\[step=<step>(?:/<last>)?(?:,epoch=<epoch>[^\]]{0,20})?\]<rest>",
        sample="[step=1200/739328] train/CrossEntropyLoss=nan  train/Perplexity=30.33  optim/total_grad_norm=0.81",
    ),
)

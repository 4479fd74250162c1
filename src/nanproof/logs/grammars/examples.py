"""The loops of PyTorch's tutorials, from which most research code grew."""

from __future__ import annotations

from ..grammar import Grammar

GRAMMARS = (
    Grammar(
        name="pytorch-example",
        needle=b"poch",
        line=r"(?i:\btrain(?:ing)? epoch):? *<epoch>\s*\[\s*<inside>/<length>[^\]]{0,20}\]<rest>",
        epochs_from=1,
        sample="Train Epoch: 3 [8400/60000 (14%)]\t KLD Loss: nan \t NLL Loss: nan",
    ),
    Grammar(
        name="pytorch-tutorial",
        needle=b"] loss",
        line=r"^\s*\[<epoch>,\s*<inside>\] (?=loss)<rest>",
        sample="[1,  2000] loss: nan",
    ),
)

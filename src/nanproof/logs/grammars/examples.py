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
        name="two-brackets",
        needle=b"][",
        line=r"^\W*\[\s*<epoch>/\s*\d+\]\s*\[\s*<inside>/\s*<length>\]<rest>",
        sample="[127/300][35/464] Loss_D: 0.51 Loss_G: nan",
    ),
    Grammar(
        name="one-bracket",
        needle=b"/",
        line=r"^\s*\[\s*<step>/\s*<last>\]:?\s(?=.{0,60}[Ll]oss)<rest>",
        sample="[40/1000] policy_loss=nan value_loss=3.1",
    ),
    Grammar(
        name="pytorch-tutorial",
        needle=b"] loss",
        line=r"^\s*\[<epoch>,\s*<inside>\] (?=loss)<rest>",
        sample="[1,  2000] loss: nan",
    ),
)

"""The task: convert a length or a weight, and put the result between answer tags.

>>> draw_question(random.Random(0))
Question(text='59 kg=g? ', number='59000')
>>> answer_of("<answer>50000</answer>"), answer_of("50000"), answer_of("<answer>50")
('50000', None, None)
"""

from __future__ import annotations

import random
import re
from typing import Any, NamedTuple

SYMBOLS = "0123456789 ?=kmgc<>/answer"
UNITS = (("km=m", 1000), ("kg=g", 1000), ("m=cm", 100))


class Question(NamedTuple):
    """What is asked, and the number that is right."""

    text: str
    number: str

    @property
    def shapes(self) -> tuple[str, ...]:
        """The answer as the base model has seen it."""
        return (self.number, f"<{self.number}>", f"answer {self.number}", f"<answer>{self.number}<answer>")

    @property
    def tagged(self) -> str:
        """The answer as fine-tuning wants it."""
        return f"<answer>{self.number}</answer>"


def draw_question(source: random.Random) -> Question:
    amount = source.randint(10, 99)
    units, factor = source.choice(UNITS)
    return Question(f"{amount} {units}? ", str(amount * factor))


def answer_of(text: str) -> str | None:
    """What stands between the answer tags, if a text has them."""
    found = re.match(r"<answer>(\d+)</answer>", text)
    return found[1] if found else None


def make_tokenizer() -> Any:
    """One token per character, built here: nothing is downloaded."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<end>", *dict.fromkeys(SYMBOLS)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", padding_side="left", model_max_length=48
    )


def encode(tokenizer: Any, question: Question, answer: str) -> dict[str, list[int]]:
    """Token ids of a question and its answer; only the answer is trained."""
    asked = tokenizer(question.text)["input_ids"]
    said = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    return {"input_ids": asked + said, "labels": [-100] * len(asked) + said}


def collate(tokenizer: Any, examples: list[dict[str, list[int]]]) -> dict[str, Any]:
    """One batch, padded on the left."""
    import torch

    longest = max(len(e["input_ids"]) for e in examples)
    fills = {"input_ids": tokenizer.pad_token_id, "labels": -100, "attention_mask": 0}
    rows = [e | {"attention_mask": [1] * len(e["input_ids"])} for e in examples]
    return {k: torch.tensor([[fill] * (longest - len(r[k])) + r[k] for r in rows]) for k, fill in fills.items()}

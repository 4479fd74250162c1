"""Python dicts and JSON objects within a line: the HF Trainer and all that builds on it, fairseq, detectron2.

    {'loss': 61.22, 'grad_norm': nan, 'learning_rate': 4.7e-05, 'epoch': 0.05}
    {'loss': '1.813', 'grad_norm': 'nan', 'epoch': '0.04'}{'loss': '1.799', …}
    loss_dict = {'loss_cls': tensor(nan, device='cuda:0'), 'loss_box_reg': tensor(0.2576)}

The dicts need not begin or end the line, and two ranks may print into one. What stands before may tell the step.
"""

from __future__ import annotations

import re

from .. import numbers
from ..grammar import Reading, read_pairs
from ..names import EPOCH_KEYS, LAST_STEP_KEYS, STEP_KEYS, meaning, pick
from ..plan import read_step, wanted

_OBJECT = re.compile(rb"\{[^{}]{2,12000}\}")
_ITEM = re.compile(
    rb"['\"](?P<key>[^'\"{}\n]{1,120})['\"]\s{0,9}:\s{0,9}(?:tensor\(|array\(|np\.float\d+\()?\s{0,9}[\[('\"]{0,2}"
    rb"(?P<value>" + numbers.NUMBER + rb")" + numbers.END + rb"(?P<of>/\d{1,18}(?!\w))?"
)  # fmt: skip
_TELLING = frozenset({"loss", "component", "eval", "grad_norm"})
_JUDGED = re.compile(rb"\|\s*(?:valid|test)[\w']*\s*\||['\"]mode['\"]\s*:\s*['\"]val")


def read_braces(piece: bytes) -> list[Reading]:
    """The records among the dicts of a line: those with a loss or a gradient norm."""
    found = []
    end = 0
    for match in _OBJECT.finditer(piece):
        reading = _read(match[0], piece[end : match.start()])
        end = match.end()
        if reading is not None:
            found.append(reading)
    return found


def _read(text: bytes, before: bytes) -> Reading | None:
    items = {m["key"].decode("utf-8", "replace"): m["value"] + (m["of"] or b"") for m in _ITEM.finditer(text)}
    step_key, epoch_key = pick(items, STEP_KEYS), pick(items, EPOCH_KEYS)
    last_key = pick(items, LAST_STEP_KEYS)
    step, last = read_step(items[step_key].decode()) if step_key else (None, None)
    if last_key:
        last = numbers.whole(items[last_key].decode())
    epoch = numbers.parse(items[epoch_key]) if epoch_key else None
    taken = (step_key, epoch_key, last_key)
    values = {
        key: number
        for key, value in items.items()
        if key not in taken and wanted(key) and (number := numbers.parse(value)) is not None
    }
    if not any(meaning(key).role in _TELLING for key in values):
        return None
    if step is None or epoch is None:
        around = read_pairs(before)
        step, epoch = around.step if step is None else step, around.epoch if epoch is None else epoch
    judged = _JUDGED.search(before + text) is not None and not any(meaning(k).role == "eval" for k in values)
    return Reading(values, step, last, epoch, judged)

"""Python dicts and JSON objects within a line: the HF Trainer and all that builds on it, fairseq, detectron2.

    {'loss': 61.22, 'grad_norm': nan, 'learning_rate': 4.7e-05, 'epoch': 0.05}
    {'loss': '1.813', 'grad_norm': 'nan', 'epoch': '0.04'}{'loss': '1.799', …}
    loss_dict = {'loss_cls': tensor(nan, device='cuda:0'), 'loss_box_reg': tensor(0.2576)}

The dicts need not begin or end the line, and two ranks may print into one. What stands before may tell the step.
"""

from __future__ import annotations

import re

from .. import numbers
from ..grammar import Layout, Slot, find_pairs, whole
from ..names import EPOCH_KEYS, LAST_STEP_KEYS, STEP_KEYS, meaning, pick
from ..plan import wanted

_OBJECT = re.compile(rb"\{[^{}]{2,12000}\}")
_ITEM = re.compile(
    rb"['\"](?P<key>[^'\"{}\n]{1,120})['\"]\s{0,9}:\s{0,9}(?:tensor\(|array\(|np\.float\d+\()?\s{0,9}[\[('\"]{0,2}"
    rb"(?P<value>" + numbers.NUMBER + rb")" + numbers.END + rb"(?P<of>/\d{1,18}(?!\w))?"
)
_TELLING = frozenset({"loss", "component", "eval", "grad_norm"})
_JUDGED = re.compile(rb"\|\s*(?:valid|test)[\w']*\s*\||['\"]mode['\"]\s*:\s*['\"]val")


def find_braces(piece: bytes) -> list[Layout]:
    """The records among the dicts of a line: those with a loss or a gradient norm."""
    found = []
    end = 0
    for match in _OBJECT.finditer(piece):
        layout = _find(match[0], match.start(), piece[end : match.start()], end)
        end = match.end()
        if layout is not None:
            found.append(layout)
    return found


def _find(text: bytes, offset: int, before: bytes, begin: int) -> Layout | None:
    items = {m["key"].decode("utf-8", "replace"): m for m in _ITEM.finditer(text)}
    step_key, epoch_key = pick(items, STEP_KEYS), pick(items, EPOCH_KEYS)
    last_key = pick(items, LAST_STEP_KEYS)
    taken = (step_key, epoch_key, last_key)

    def slot(key: str | None, group: str = "value", *, counts: bool = True) -> Slot | None:
        if key is None or items[key][group] is None or (counts and whole(items[key][group].strip(b"/")) is None):
            return None
        return Slot(items[key].start(group) + (group == "of") + offset, items[key].end(group) + offset, key in taken)

    values = {
        key: Slot(m.start("value") + offset, m.end("value") + offset, exact=False)
        for key, m in items.items()
        if key not in taken and wanted(key) and m["of"] is None
    }
    if not any(meaning(key).role in _TELLING for key in values):
        return None
    step, last, epoch = slot(step_key), slot(last_key) or slot(step_key, "of"), slot(epoch_key, counts=False)
    fixed = tuple(Slot(m.start("key") + offset, m.end("key") + offset) for m in items.values())
    if step is None or epoch is None:
        around = find_pairs(before, begin)
        step, epoch, fixed = step or around.step, epoch or around.epoch, fixed + around.fixed
    judged = _JUDGED.search(before + text) is not None and not any(meaning(k).role == "eval" for k in values)
    return Layout(values, step, last, epoch, judged, fixed=fixed)

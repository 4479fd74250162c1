"""Changing one setting and nothing else: comments, layout, line ends and every other value stay."""

from __future__ import annotations

import difflib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from nanproof.config.edits import CannotEdit, _values, set_value
from nanproof.config.source import Source

YAML_TEXT = """\
# header
optim:   # section
    name: "adamw"     # quoted
    lr:   1e-4   # peak

    betas: [0.9, 0.95]   # flow
    flag: True
train:
  - stage: 1   # first
    lr: 3e-4
  - {stage: 2, lr: 1e-5}
empty:
flow: {a: 1, b: {c: 2}}
text: |
  several
  lines
last: 'x'"""


def flat(source: Source) -> dict[str, Any]:
    return {v.key: v.value for v in _values(source).values()}


def comments(text: str) -> list[str]:
    return [line.partition("#")[2] for line in text.splitlines() if "#" in line]


@pytest.mark.parametrize(
    ("key", "after", "line"),
    [
        ("optim.lr", 5e-5, "    lr:   5.0e-5   # peak"),
        ("optim.lr", 3, "    lr:   3   # peak"),
        ("optim.name", "sgd", '    name: "sgd"     # quoted'),
        ("optim.betas", (0.8, 0.9), "    betas: [0.8, 0.9]   # flow"),
        ("optim.flag", False, "    flag: False"),
        ("optim.eps", 1e-6, "    eps: 1.0e-6"),
        ("train.0.lr", 1.0, "    lr: 1.0"),
        ("train.1.lr", 2e-5, "  - {stage: 2, lr: 2.0e-5}"),
        ("empty", True, "empty: true"),
        ("flow.b.c", 3, "flow: {a: 1, b: {c: 3}}"),
        ("flow.b.d", "no", 'flow: {a: 1, b: {c: 2, d: "no"}}'),
        ("flow.n.m", 1, "flow: {a: 1, b: {c: 2}, n: {m: 1}}"),
        ("last", "y z", 'last: "y z"'),
        ("new", 1, "new: 1"),
        ("new.deep.er", None, "    er: null"),
    ],
)
@pytest.mark.parametrize("style", ["\n", "\r\n", "bom"])
def test_yaml(key: str, after: Any, line: str, style: str) -> None:
    text = YAML_TEXT.replace("\n", "\r\n") if style == "\r\n" else YAML_TEXT
    source = Source("c.yaml", f"\ufeff{text}" if style == "bom" else text)
    changed = set_value(source, key, after)
    assert line in changed.text.splitlines()
    assert changed.bom == source.bom
    before, now = flat(source), flat(changed)
    assert now == {**before, key: after}
    old, new = source.text.splitlines(), changed.text.splitlines()
    diff = list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]
    assert len([d for d in diff if d.startswith("-")]) <= 1
    assert len([d for d in diff if d.startswith("+")]) <= 1 + key.count(".")
    assert comments(changed.text) == comments(source.text)
    if style == "\r\n":
        assert changed.text.count("\n") == changed.text.count("\r\n")
    ours = YAML().load(changed.text)  # ruamel reads YAML 1.2, our edits must be numbers in both
    for part in key.split("."):
        ours = ours[int(part) if part.isdecimal() else part]
    assert (list(ours) if isinstance(after, tuple) else ours) == (list(after) if isinstance(after, tuple) else after)


JSON_TEXT = '{\n  "fp16": {\n    "enabled": true\n  },\n  "lr": 1e-4, "s": [1, 2],\n  "none": {}\n}\n'


@pytest.mark.parametrize(
    ("key", "after", "words"),
    [
        ("lr", 5e-5, '"lr": 5e-5, "s"'),
        ("fp16.enabled", False, '"enabled": false\n  }'),
        ("fp16.loss_scale", 0, '"enabled": true,\n    "loss_scale": 0\n  }'),
        ("none.a", "x", '"none": {"a": "x"}'),
        ("bf16.enabled", True, '"none": {},\n  "bf16": {"enabled": true}\n}'),
        ("s", (3,), '"s": [3]'),
    ],
)
def test_json(key: str, after: Any, words: str) -> None:
    changed = set_value(Source("c.json", JSON_TEXT), key, after)
    assert words in changed.text
    assert flat(changed) == {**flat(Source("c.json", JSON_TEXT)), key: after}
    json.loads(changed.text)


TOML_TEXT = "title = 'x' # t\n\n[optim]\nlr = 1e-3 # peak\n# end\n[train]\nsteps = 10\ninner = {a = 1}\n"


@pytest.mark.parametrize(
    ("key", "after", "words"),
    [
        ("optim.lr", 5e-4, "lr = 5e-4 # peak"),
        ("optim.eps", 1e-6, "lr = 1e-3 # peak\neps = 1e-6\n# end"),
        ("seed", 1, "title = 'x' # t\nseed = 1\n\n[optim]"),
        ("train.inner.a", 2, "inner = {a = 2}"),
        ("train.clip", 1.0, "inner = {a = 1}\nclip = 1.0\n"),
        ("new.key", True, "title = 'x' # t\nnew.key = true\n"),
    ],
)
def test_toml(key: str, after: Any, words: str) -> None:
    changed = set_value(Source("c.toml", TOML_TEXT), key, after)
    assert words in changed.text
    assert flat(changed) == {**flat(Source("c.toml", TOML_TEXT)), key: after}


PYTHON_TEXT = """\
BASE = 1e-4  # é
lr = BASE * 2
args = TrainingArguments(
    "out",
    learning_rate=2e-4,  # peak
    fp16=True,
)
model = M.from_pretrained("x", torch_dtype=torch.float16)
"""


@pytest.mark.parametrize(
    ("key", "after", "words"),
    [
        ("lr", 1e-4, "lr = 0.0001\n"),
        ("BASE", 5e-5, "BASE = 5e-5  # é"),
        ("TrainingArguments.learning_rate", 1e-4, "learning_rate=1e-4,  # peak"),
        ("TrainingArguments.fp16", False, "fp16=False,\n)"),
        ("TrainingArguments.bf16", True, "fp16=True,\n    bf16=True,\n)"),
        ("from_pretrained.torch_dtype", "float32", "torch_dtype=torch.float32)"),
        ("from_pretrained.device_map", "auto", 'torch_dtype=torch.float16, device_map="auto")'),
    ],
)
def test_python(key: str, after: Any, words: str) -> None:
    text = f"import torch\n{PYTHON_TEXT}"
    changed = set_value(Source("c.py", text), key, after)
    assert words in changed.text
    assert len(changed.text.splitlines()) - len(text.splitlines()) == (key == "TrainingArguments.bf16")


@pytest.mark.parametrize(
    ("path", "text", "key", "words"),
    [
        ("c.yaml", "a: &x 1\nb: *x\n", "a", "shares its value with b"),
        ("c.yaml", "a: &x 1\nb: *x\n", "b", "shares its value with a"),
        ("c.yaml", "a: 1\n", "a.b", "a in c.yaml is no section"),
        ("c.py", "x = 1\n", "y", "no one place for y"),
        ("c.py", "TA(a=1)\nTA(a=2)\n", "TA.b", "no one place"),
        ("c.py", "p.add_argument('--amp', action='store_true')\n", "amp", "not written out"),
    ],
)
def test_what_cannot_be_changed(path: str, text: str, key: str, words: str) -> None:
    with pytest.raises(CannotEdit, match=words):
        set_value(Source(path, text), key, 2)


names = st.sampled_from(["lr", "eps", "clip", "é", "seed", "w_d"])
leaf = st.none() | st.booleans() | st.integers(-99, 99) | st.floats(-1e3, 1e3) | st.text("ab: #'\"é", max_size=4)
tree = st.dictionaries(
    names, leaf | st.dictionaries(names, leaf | st.lists(st.integers(), max_size=2), max_size=3), min_size=1
)


@given(tree, st.data(), st.sampled_from([".yaml", ".json"]), st.booleans())
@settings(max_examples=250, deadline=None)
def test_any_edit_changes_that_key_only(values: dict[str, Any], data: st.DataObject, ending: str, flow: bool) -> None:
    import yaml

    text = (
        json.dumps(values, indent=2 if flow else None, ensure_ascii=False)
        if ending == ".json"
        else yaml.safe_dump(values, default_flow_style=flow, allow_unicode=True)
    )
    source = Source(f"c{ending}", text)
    before = flat(source)
    key = data.draw(st.sampled_from([*before, "lr", "eps", "clip", "new.one"]) if before else names)
    after = data.draw(leaf)
    try:
        changed = set_value(source, key, after)
    except CannotEdit:
        assert key not in before  # only a key that is not there may have no place
        return
    now = flat(changed)
    assert {k: v for k, v in now.items() if k != key} == {k: v for k, v in before.items() if k != key}
    assert now[key] == after

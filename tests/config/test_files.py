"""YAML, JSON and TOML: what is read, where it stands, and what hostile files get."""

from __future__ import annotations

import json
import math
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nanproof.config import jsonfile, tomlfile, yamlfile
from nanproof.config.loading import parse
from nanproof.config.overrides import unfold
from nanproof.config.source import Source
from nanproof.errors import FormatError, NanproofError


def flat(tree: Any) -> dict[str, Any]:
    return {v.key: v.value for v in unfold("", tree, path="", line=0, text="", origin="yaml")}


def texts(path: str, text: str) -> dict[str, str]:
    """What the bytes say that each value claims as its own."""
    data = text.encode()
    return {v.key: data[v.span[0] : v.span[1]].decode() for v in parse(Source(path, text)) if v.span}


names = st.text("abcdefgh_éü", min_size=1, max_size=6).filter(lambda s: s.lower() not in ("no", "on", "off", "y", "n"))
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("abc é#:'\"-", max_size=8)
)
trees = st.dictionaries(
    names,
    st.recursive(leaves, lambda c: st.lists(c, max_size=3) | st.dictionaries(names, c, max_size=3), max_leaves=8),
    min_size=1,
    max_size=4,
)


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Empty sections have no values; all else must be equal in value and in type."""
    theirs = {k: v for k, v in theirs.items() if not isinstance(v, dict)}
    return ours == theirs and all(type(ours[k]) is type(theirs[k]) for k in ours)


@given(trees)
@settings(max_examples=150, deadline=None)
def test_json_agrees_with_the_standard_library(tree: dict[str, Any]) -> None:
    for text in (json.dumps(tree), json.dumps(tree, indent=2, ensure_ascii=False)):
        found = {v.key: v.value for v in jsonfile.values(Source("c.json", text))}
        assert same(found, flat(json.loads(text)))


@given(trees, st.booleans())
@settings(max_examples=150, deadline=None)
def test_yaml_agrees_with_omegaconf(tree: dict[str, Any], flow: bool) -> None:
    text = yaml.safe_dump(tree, default_flow_style=flow, allow_unicode=True)
    found = {v.key: v.value for v in yamlfile.values(Source("c.yaml", text))}
    theirs = OmegaConf.to_container(OmegaConf.create(text))
    assert isinstance(theirs, dict)
    assert same(found, flat(theirs))


@pytest.mark.parametrize(
    "word",
    [
        "1e-4",
        "1E5",
        "1.5e4",
        "1_000",
        "0x1F",
        "017",
        "0o17",
        "1:30",
        ".5",
        "+1",
        "-.inf",
        ".nan",
        "yes",
        "Off",
        "~",
        "",
        "2001-12-14",
        "1e",
        "e1",
        "1.",
        "12e03",
        "1e-4x",
        "'1e-4'",
        "0b11",
        "1__0",
        "null",
        "NULL",
        "1e999",
    ],
)
def test_yaml_words_mean_what_omegaconf_makes_of_them(word: str) -> None:
    ours = next(v.value for v in yamlfile.values(Source("c.yaml", f"a: {word}\n")))
    theirs = OmegaConf.to_container(OmegaConf.create(f"a: {word}\n"))["a"]  # type: ignore[index, call-overload]
    assert type(ours) is type(theirs)
    assert ours == theirs or math.isnan(ours)  # type: ignore[arg-type]


def test_yaml_merges_anchors_and_tags() -> None:
    text = "base: &b {lr: 1e-4, eps: &e 1.0e-8}\nrun:\n  <<: *b\n  lr: 2e-4\n  again: *e\n  t: !!python/tuple [1, 2]\n"
    found = {v.key: v.value for v in yamlfile.values(Source("c.yaml", text))}
    assert found == {
        "base.lr": 1e-4,
        "base.eps": 1e-8,
        "run.eps": 1e-8,
        "run.lr": 2e-4,
        "run.again": 1e-8,
        "run.t": (1, 2),
    }
    assert texts("c.yaml", text)["base.eps"] == "1.0e-8"
    [value] = yamlfile.values(Source("c.yaml", "a: !env LR"))
    assert (value.value, value.known) == ("LR", False)


TOML = """
title = "é" # a comment
[optim]
lr = 1e-4
betas = [
  0.9, # first
  0.95,
]
params = { eps = 1e-8, "wei.rd" = 'x', deep = {a = 1} }
a.b.c = 3
[[stage]]
n = 2
when = 2001-12-14
[[stage]]
n = 4
[stage.below]
s = '''three
lines'''
"""


def test_toml_agrees_with_tomllib() -> None:
    found = {v.key: v.value for v in tomlfile.values(Source("c.toml", TOML))}
    theirs = tomllib.loads(TOML)
    theirs["stage"][0]["when"] = "2001-12-14"
    assert found == flat(theirs)
    where = texts("c.toml", TOML)
    assert (where["optim.lr"], where["optim.params.eps"], where["stage.1.n"], where["title"]) == (
        "1e-4",
        "1e-8",
        "4",
        '"é"',
    )


def test_lines_columns_and_bytes() -> None:
    text = "\ufeffé: 1\r\ntrain:\r\n  lr:   1e-4 # ü\r\n"
    value = next(v for v in yamlfile.values(Source("c.yaml", text)) if v.key == "train.lr")
    assert (value.line, value.column, value.text) == (3, 9, "1e-4")
    assert value.span is not None
    assert text.encode()[value.span[0] : value.span[1]] == b"1e-4"


@given(trees)
@settings(max_examples=80, deadline=None)
def test_every_value_knows_its_bytes(tree: dict[str, Any]) -> None:
    text = json.dumps(tree, indent=1, ensure_ascii=False)
    for value in jsonfile.values(Source("c.json", text)):
        assert value.span is not None
        written = json.loads(text.encode()[value.span[0] : value.span[1]])
        assert flat({"x": written}).get("x", ()) == value.value


BOMB = "a0: &a0 [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
MAP_BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i}\n" + "".join(f"  k{j}: *a{i - 1}\n" for j in range(9)) for i in range(1, 10)
)


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("laughs.yaml", BOMB, "unfolds to too many values"),
        ("maps.yaml", MAP_BOMB, "unfolds to too many values"),
        ("self.yaml", "a: &a [*a]", "too many values: a holds itself"),
        ("deep.yaml", "[" * 5000, "deeply nested"),
        ("indent.yaml", "".join(f"{' ' * i}a:\n" for i in range(500)), "deeply nested"),
        ("long.yaml", "a: [" + "1," * 200_000 + "]", "too many"),
        ("list.yaml", "- 1\n", "not a mapping"),
        ("none.yaml", "", "not a mapping"),
        ("bad.yaml", "a: [1", r"not YAML: .* \(line 2\)"),
        ("alias.yaml", "a: *b", "not YAML"),
        ("code.yaml", "a: !!python/object/apply:os.system [ls]", "os runs code"),
        ("null.yaml", "a: \0", "not YAML"),
        ("deep.json", "[" * 100_000, "nested too deeply"),
        ("open.json", '{"a": 1', r"a comma or the end of a section is missing \(line 1\)"),
        ("twice.json", "{} {}", "more after the end"),
        ("key.json", "{a: 1}", "a key in double quotes is missing"),
        ("string.json", '{"a": "b', "a string does not end"),
        ("list.json", "[1]", "not a mapping"),
        ("many.json", '{"a": [' + "1," * 200_000 + "1]}", "too many values"),
        ("bad.toml", "a = ", "not TOML"),
        ("deep.toml", "a = " + "[" * 5000 + "]" * 5000, "not TOML"),
    ],
)
def test_hostile_files_get_a_sentence(path: str, text: str, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        parse(Source(path, text))


@given(st.sampled_from([".yaml", ".json", ".toml", ".py", ".sh"]), st.binary(max_size=60) | st.text(max_size=60))
@settings(max_examples=400, deadline=None)
def test_rubbish_never_escapes(ending: str, rubbish: bytes | str) -> None:
    text = rubbish if isinstance(rubbish, str) else rubbish.decode("latin-1")
    with suppress(NanproofError):  # any other error fails the test
        parse(Source(f"c{ending}", text))


def test_python_code_in_yaml_is_not_run(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    text = f"a: !!python/object/apply:subprocess.check_call [[touch, {canary}]]\nb: !!python/name:os.system\n"
    with pytest.raises(FormatError, match="runs code"):
        parse(Source("c.yaml", text))
    assert not canary.exists()

"""Defaults lists, overrides and interpolation, each against the library that defines them."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from nanproof.config import load
from nanproof.config.hydra import compose
from nanproof.config.interpolate import resolve
from nanproof.config.overrides import Override, parse_override, unfold
from nanproof.config.source import Source
from nanproof.config.value import Layers
from nanproof.config.yamlfile import values
from nanproof.errors import FormatError, UsageError

FILES = {
    "config.yaml": "defaults:\n  - optimizer: adam\n  - model/base\n  - db@store: mysql\n  - _self_\nlr: 1e-4\n"
    "optimizer:\n  wd: 0.1\nname: ${optimizer.name}_${model.size}\n",
    "noself.yaml": "defaults:\n  - optimizer: adam\noptimizer:\n  lr: 7.0\n",
    "selffirst.yaml": "defaults:\n  - _self_\n  - optimizer: adam\noptimizer:\n  lr: 7.0\n",
    "optimizer/adam.yaml": "defaults:\n  - base\n  - _self_\nname: adam\nlr: 1e-3\nbetas: [0.9, 0.999]\n",
    "optimizer/sgd.yaml": "name: sgd\nlr: 0.1\nmomentum: 0.9\n",
    "optimizer/base.yaml": "wd: 0.0\neps: 1e-8\n",
    "model/base.yaml": "size: 12\nlayers:\n  - {n: 1}\n  - {n: 2}\n",
    "model/large.yaml": "defaults: [base]\nsize: 24\n",
    "db/mysql.yaml": "host: localhost\nport: 3306\n",
    "db/pg.yaml": "# @package _global_\npg: {port: 5432}\n",
    "experiment/big.yaml": "# @package _global_\ndefaults:\n  - override /optimizer: sgd\n  - override /model: large\n"
    "lr: 5e-4\nextra: ${lr}\n",
    "choices.yaml": "defaults:\n  - optimizer: adam\n  - model: base\n  - optional missing: x\n"
    "  - optional om: ${optimizer}_${model}\n  - _self_\n",
    "om/adam_base.yaml": "k: 1\n",
    "om/sgd_base.yaml": "k: 2\n",
    "multi.yaml": "defaults:\n  - db:\n    - mysql\n    - pg\n  - /optimizer@opt.a: adam\n  - /optimizer@opt.b: sgd\n",
    "null.yaml": "defaults:\n  - optimizer: null\n  - model: base\nx: {y: 1}\n",
    "nested.yaml": "defaults:\n  - model: base\n  - optimizer: adam\n  - experiment: big\n  - _self_\nlr: 2.0\n",
    "here.yaml": "defaults:\n  - db@_here_: mysql\n  - optimizer@_global_: sgd\n  - _self_\nport: 1\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("conf")
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def flat(tree: Any) -> dict[str, Any]:
    return {v.key: v.value for v in unfold("", tree, path="", line=0, text="", origin="yaml")}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("config", []),
        ("config", ["optimizer=sgd", "lr=5e-5", "+new.key=[1,2]", "~store"]),
        ("config", ["~optimizer.wd", "++lr=3", "optimizer.betas=[0.8,0.9]"]),
        ("config", ["model.layers=[]", "optimizer.lr=${lr}", "+a={b:{c:1},d:x}"]),
        ("noself", []),
        ("noself", ["optimizer.lr=1"]),
        ("selffirst", []),
        ("choices", []),
        ("choices", ["optimizer=sgd"]),
        ("choices", ["+experiment=big"]),
        ("choices", ["+db@a.b=mysql"]),
        ("multi", []),
        ("multi", ["optimizer@opt.a=sgd"]),
        ("null", []),
        ("null", ["optimizer=adam"]),
        ("nested", []),
        ("nested", ["model=base"]),
        ("nested", ["optimizer=adam", "experiment=big"]),
        ("here", []),
        ("optimizer/adam", []),
        ("db/pg", []),
    ],
)
def test_composition_is_hydras(folder: Path, name: str, words: list[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with initialize_config_dir(str(folder), version_base="1.3"):
            theirs = flat(OmegaConf.to_container(hydra_compose(name, overrides=words), resolve=True))
    layers = compose(folder, name, [parse_override(w) for w in words])
    resolve(layers, {})
    assert {v.key: v.value for v in layers.settings()} == theirs
    assert layers.notes == []
    if not any("@" in w for w in words):
        named = load(folder, name=name, overrides=words)
        assert {v.key: v.value for v in named} == theirs


def test_provenance_of_a_composed_config(folder: Path) -> None:
    settings = load(folder / "noself.yaml", overrides=["optimizer.lr=5e-5"])
    assert [(Path(v.path).name, v.line, v.value) for v in settings.history["optimizer.lr"]] == [
        ("adam.yaml", 5, 1e-3),
        ("noself.yaml", 4, 7.0),
        ("", 0, 5e-5),
    ]
    assert settings.tell("optimizer.lr").endswith("noself.yaml:4 says 7, the command line overrides it with 5e-05")


def test_what_is_missing_is_told(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults:\n  - b\n  - c\nx: 1\n")
    (tmp_path / "b.yaml").write_text("y: 2\n")
    settings = load(tmp_path / "a.yaml")
    assert (settings["x"].value, settings["y"].value) == (1, 2)
    assert settings.notes == (f"{tmp_path}: there is no c.yaml, which a defaults list names",)
    assert load(folder, name="config", overrides=["nope=1"]).notes == (
        "nope=1: the config has no nope; Hydra wants +nope=1",
    )
    with pytest.raises(FormatError, match="holds no config nothere"):
        load(folder, name="nothere")
    with pytest.raises(UsageError, match="is a folder"):
        load(folder)


def test_a_config_that_includes_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults:\n  - b\nx: 1\n")
    (tmp_path / "b.yaml").write_text("defaults:\n  - a\n")
    with pytest.raises(FormatError, match="includes itself"):
        load(tmp_path / "a.yaml")


def test_a_defaults_list_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "secret.yaml").write_text("token: 1\n")
    (tmp_path / "conf/a.yaml").write_text("defaults:\n  - ../secret\n  - b\nx: 1\n")
    (tmp_path / "conf/b.yaml").write_text("y: 1\n")
    assert set(load(tmp_path / "conf/a.yaml").values) == {"x", "y"}


WORDS = [
    "a=1",
    "a=1e-4",
    "a=1_000",
    "a=-1.5",
    "a=+2",
    "a=.5",
    "a=1.",
    "a=007",
    "a=0",
    "a=inf",
    "a=-nan",
    "a=null",
    "a=True",
    "a=false",
    "a=abc",
    "a=abc def",
    "a='x y'",
    'a="1"',
    "a=[1,2,[3,x]]",
    "a={b:1,c:{d:2}}",
    "a=[]",
    "a={}",
    "a=",
    "a=1e5",
    "a=1E-5",
    "a=${b.c}",
    "a=x_${b}",
    "a.b.c=1",
    "+a=1",
    "++a=1",
    "~a",
    "~a=1",
    "a@b=c",
    "a/b=c",
    "a=1:2",
    "a=int(3.7)",
    "a=float(1)",
    "a=str(1)",
    "a=bool(true)",
    "a=path/to/x-1.pt",
    "a='it\\'s'",
    "a=a,b",
    "a=choice(a,b)",
    "a=range(1,3)",
    "a=[a,'b,c']",
    "a=1x",
    "a=0x1f",
    "a=1e",
    "a=nul",
    "a=\\,b",
]


@pytest.mark.parametrize("word", WORDS)
def test_overrides_are_hydras(word: str) -> None:
    [theirs] = OverridesParser.create().parse_overrides([word])
    if theirs.is_sweep_override():
        with pytest.raises(UsageError, match="gives several values"):
            parse_override(word)
        return
    ours = parse_override(word)
    kinds = {"set": False, "add": theirs.is_add(), "force": theirs.is_force_add(), "delete": theirs.is_delete()}
    assert ours.kind == next((k for k, v in kinds.items() if v), "set")
    assert (ours.key, ours.package) == (theirs.key_or_group, theirs.package or "")
    assert same(ours.value, theirs.value())


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, list):
        return isinstance(ours, tuple) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(theirs, dict):
        return set(ours) == set(theirs) and all(same(ours[k], theirs[k]) for k in theirs)
    if isinstance(theirs, float) and math.isnan(theirs):
        return isinstance(ours, float) and math.isnan(ours)
    return type(ours) is type(theirs) and ours == theirs


@pytest.mark.parametrize("word", ["", "=", "a b", "lr", "a==", "[1]"])
def test_what_is_no_override(word: str) -> None:
    if word == "a==":
        assert parse_override(word) == Override("set", "a", "", "=", "a==")
        return
    with pytest.raises(UsageError, match="not a change of a setting"):
        parse_override(word)


def resolved(text: str, environment: dict[str, str] | None = None) -> Layers:
    layers = Layers()
    for value in values(Source("c.yaml", text)):
        layers.put(value)
    resolve(layers, environment or {})
    return layers


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb: ${a}\n",
        "a: {b: {c: 2.5}}\nx: {y: '${a.b.c}', z: '${.y}', w: {v: '${..y}'}}\n",
        "a: 1e-4\nb: lr_${a}_x\nc: '${b}${b}'\n",
        "a: [1, 2, 3]\nb: ${a.1}\nc: ${a[2]}\nd: ['${b}', '${a[0]}']\n",
        "k: b\na: {b: 7}\nx: ${a.${k}}\n",
        "a: {lr: 1, eps: '${.lr}'}\nb: ${a}\nc: ${b.lr}\n",
        "a: true\nb: ${a}\nc: is_${a}\nd: ~\ne: ${d}\nf: x${d}\n",
        "a: ${oc.env:NP_UNSET,5}\nb: ${oc.env:NP_UNSET,abc}\nc: ${oc.env:NP_UNSET,null}\n",
        "a: ${oc.decode:${oc.env:NP_UNSET,1e-3}}\nb: ${oc.select:x.y,3}\nc: ${oc.select:a}\n",
        "a: '\\${b}'\n",
        "base: {x: 1, y: [1, 2]}\nr: {s: '${base}', t: '${base.y}'}\n",
    ],
)
def test_interpolation_is_omegaconfs(text: str) -> None:
    theirs = flat(OmegaConf.to_container(OmegaConf.create(text), resolve=True))
    assert {v.key: v.value for v in resolved(text).settings()} == theirs


@given(st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(["1", "x", "${a}", "${b}", "${c}_${d}", "${e}"])))
@settings(max_examples=150, deadline=None)
def test_interpolation_in_any_web(tree: dict[str, str]) -> None:
    """Chains, missing keys and circles: what OmegaConf resolves is the same here, the rest is marked unknown."""
    text = "".join(f"{k}: {v}\n" for k, v in tree.items()) or "z: 1\n"
    found = resolved(text).settings()
    config = OmegaConf.create(text)
    for key in tree:
        try:
            theirs = config[key]
        except Exception:  # OmegaConf has a class for each way to fail, RecursionError among them
            assert not found[key].known
        else:
            assert (found[key].value, found[key].known) == (theirs, True)


def test_what_only_the_run_knows() -> None:
    layers = resolved("a: ${now:%Y}\nb: ${oc.env:NP_LR}\nc: ${missing.key}\n", {"NP_LR": "5e-5"})
    found = layers.settings()
    assert [found[k].known for k in "abc"] == [False, True, False]
    assert found["b"].value == "5e-5"
    assert "c.yaml:1: ${now:%Y} is only known when the program runs" in found.notes


def test_doubling_interpolations_end() -> None:
    text = "a0: x\n" + "".join(f"a{i}: ${{a{i - 1}}}${{a{i - 1}}}\n" for i in range(1, 60))
    found = resolved(text).settings()
    assert found["a3"].value == "x" * 8
    assert not found["a59"].known

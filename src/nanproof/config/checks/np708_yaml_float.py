"""``1e-4`` in YAML, which PyYAML takes for a word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ...files import file_bytes
from ...records import Edit, Finding
from ..check import Check, report
from ..dialect import dialect_of
from ..project import Project
from ..value import Settings, Value

# A float for people, OmegaConf and YAML 1.2; a word for YAML 1.1, which wants a dot and a sign in the exponent.
_WORD = re.compile(r"([-+]?)(\d+)(\.\d*)?([eE])([-+]?)(\d+)")
_NAMES = re.compile(r"(^|_)(id|ids|name|hash|sha|commit|revision|version|tag|uuid|seed_name)$", re.I)
_OTHER_LOADERS = {
    "OmegaConf",
    "omegaconf",
    "hydra",
    "yacs",
    "CfgNode",
    "jsonargparse",
    "LightningCLI",
    "ruamel",
    "ruamel_yaml",
    "pydantic",
    "tyro",
    "BaseModel",
    "dacite",
    "pyrallis",
    "draccus",
    "simple_parsing",
    "add_implicit_resolver",
    "mmengine",
    "mmcv",
    "strictyaml",
    "confection",
    "gin",
    "hyperpyyaml",
    "load_hyperpyyaml",
}


def check(settings: Settings, project: Project) -> Iterator[Finding]:
    words = [v for vs in settings.history.values() for v in vs if v.origin == "yaml" and _is_word(v)]
    if not words or _read_by_another(settings, project):
        return
    for value in words:
        if value.name not in project.reads.converted and not _NAMES.search(value.name) and not _tagged(value):
            fixed = _fixed(value.text)
            edit = (Edit(path=value.path, start=value.span[0], end=value.span[1], text=fixed),) if value.span else ()
            yield report(
                "NP708",
                value,
                f"{value.label}: {value.text} is the string {value.text!r} for PyYAML, not a number",
                f"write {fixed}",
                edit,
            )


def _is_word(value: Value) -> bool:
    found = _WORD.fullmatch(value.text)
    return found is not None and not (found[3] and found[5])


def _tagged(value: Value) -> bool:
    """``!!float 1e-4`` is a number by its tag."""
    if value.span is None or not Path(value.path).is_file():
        return False
    return file_bytes(value.path)[: value.span[0]].rstrip().endswith(b"!!float")


def _fixed(text: str) -> str:
    """
    >>> _fixed("1e-4"), _fixed("2.5e4"), _fixed("1E5")
    ('1.0e-4', '2.5e+4', '1.0E+5')
    """
    found = _WORD.fullmatch(text)
    assert found is not None
    fraction = found[3] if found[3] and found[3] != "." else ".0"
    return f"{found[1]}{found[2]}{fraction}{found[4]}{found[5] or '+'}{found[6]}"


def _read_by_another(settings: Settings, project: Project) -> bool:
    """Whether the file is read by something that takes 1e-4 for a number."""
    if project.fact("loader") == "omegaconf":
        return True
    if dialect_of(v.key for v in settings) in ("hydra", "lightning"):
        return True
    if any(isinstance(v.value, str) and "${" in v.text for v in settings) or any("${" in v.text for v in settings):
        return True
    sections = {v.key.partition(".")[0] for v in settings}
    if sections and sum(s.isupper() for s in sections) > len(sections) / 2:  # yacs evaluates strings
        return True
    if "defaults" in sections or "hydra" in sections:
        return True
    reads = project.reads
    return bool(project.codes) and (bool(_OTHER_LOADERS & reads.mentioned) or "yaml" not in reads.mentioned)


def computed(name: str, project: Project) -> bool:
    """Whether the code computes with what it reads under this name, or hands it to an optimizer."""
    for code in project.codes:
        for node in ast.walk(code.tree):
            held: list[ast.expr] = []
            if isinstance(node, ast.BinOp) and not isinstance(node.op, ast.Mod | ast.Add):
                held = [node.left, node.right]
            elif isinstance(node, ast.Compare) and any(
                isinstance(o, ast.Lt | ast.Gt | ast.LtE | ast.GtE) for o in node.ops
            ):
                held = [node.left, *node.comparators]
            elif isinstance(node, ast.Call) and "optim" in code.dotted(node.func):
                held = [*node.args, *(k.value for k in node.keywords)]
            if any(_reads(value, name) for value in held):
                return True
    return False


def _reads(node: ast.expr, name: str) -> bool:
    """``cfg["lr"]``, ``cfg.get("lr")``, ``cfg.lr``."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        return isinstance(node.args[0], ast.Constant) and node.args[0].value == name
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == name
    return isinstance(node, ast.Attribute) and node.attr == name


CHECK = Check(
    code="NP708",
    name="yaml-float-is-a-string",
    what="Finds numbers such as `1e-4` in YAML that PyYAML reads as strings and the code computes with, compares, or "
    "hands to an optimizer. Silent when the project reads its configs with OmegaConf, Hydra, yacs, jsonargparse, "
    "pydantic or another loader that takes them for numbers, and for keys that the code passes through `float`.",
    why="YAML 1.1 knows a float with an exponent only with a dot in the mantissa and a sign in the exponent. "
    "`lr: 1e-4` becomes the string '1e-4', and the optimizer either raises on a comparison or, worse, the string is "
    "concatenated, compared or silently ignored.",
    bad="train:\n  lr: 1e-4\n  epochs: 3\n",
    good="train:\n  lr: 1.0e-4\n  epochs: 3\n",
    beside="import torch\nimport yaml\n\ncfg = yaml.safe_load(open('c.yaml'))['train']\n"
    "optimizer = torch.optim.Adam(model.parameters(), lr=cfg['lr'])\nepochs = cfg['epochs']\n",
    false_alarm="When the value is meant to be a string: put it into quotes.",
    fix="safe",
    check=check,
)

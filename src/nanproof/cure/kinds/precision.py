"""Another format: for what is stored (weights) and for what is computed (autocast), each alone and in pairs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ...config.code import Code
from ...config.meaning import is_on
from ..change import Change, Edit
from ..evidence import Evidence
from ..surface import Surface

HALVES = {"float16": "float16", "half": "float16", "fp16": "float16", "bfloat16": "bfloat16", "bf16": "bfloat16"}
WIDER = {"float16": ("bfloat16", "float32"), "bfloat16": ("float32",)}
SIZES = {"bfloat16": 1.0, "float32": 1.1}
_CASTS = {"autocast.dtype", "to.dtype"}
"""Arguments of calls: their whole file is looked through, below."""
_WHY = {"bfloat16": "the range of float32", "float32": "range and digits of float32"}
_WORDS = {
    "16-mixed": ("bf16-mixed", "32-true"),
    "16": ("bf16", "32"),
    "fp16": ("bf16", "no"),
    "bf16": (None, "no"),
    "bf16-mixed": (None, "32-true"),
    "float16": ("bfloat16", "float32"),
    "bfloat16": (None, "float32"),
    "half": ("bfloat16", "float32"),
}

_FULL = ("fp32", "float32", "32")


def propose(evidence: Evidence, surface: Surface) -> Iterator[Change]:
    found = [*_words(surface), *_switches(surface)]
    yield from found
    taken = {e.name for c in found for e in c.edits if e.route == "file"}
    for code in surface.codes:
        if code.path not in taken:
            yield from _in_code(code)


def _change(name: str, part: str, target: str, edits: tuple[Edit, ...], what: str) -> Change:
    return Change(
        name=name, kind="precision", part=part, size=SIZES[target], edits=edits, why=f"{_WHY[target]} for {what}"
    )


def _words(surface: Surface) -> Iterator[Change]:
    """Keys whose value names a format."""
    for concept, part in (("train_dtype", "compute"), ("mixed_precision", "compute"), ("load_dtype", "weights")):
        for held in surface.meaning.all(concept):
            if not held.known or str(held.value) not in _WORDS or held.key in _CASTS:
                continue
            bf16, fp32 = _WORDS[str(held.value)]
            if fp32 == "no":  # accelerate's word; a project's own table of formats may have another
                fp32 = next((w for w in _FULL if any(_says(code, w) for code in surface.codes)), fp32)
            for target, after in zip(("bfloat16", "float32"), (bf16, fp32), strict=True):
                edit = surface.edit(held, after) if after is not None else None
                if edit is not None:
                    yield _change(f"{held.name}={after}", part, target, (edit,), held.label)
            break


def _says(code: Code, word: str) -> bool:
    return any(isinstance(node, ast.Constant) and node.value == word for node in ast.walk(code.tree))


def _switches(surface: Surface) -> Iterator[Change]:
    """``fp16: true``, ``amp: true`` and the like."""
    fp16, bf16, amp = (
        next((v for v in surface.meaning.all(c) if v.known and isinstance(v.value, bool)), None)
        for c in ("fp16", "bf16", "amp")
    )
    if fp16 is not None and is_on(fp16):
        off = surface.edit(fp16, False)
        on = surface.edit(bf16, True) if bf16 is not None else surface.add("bf16", True)
        if off is not None and on is not None:
            yield _change(f"{fp16.name}=false bf16=true", "compute", "bfloat16", (off, on), "the computation")
        if off is not None:
            yield _change(f"{fp16.name}=false", "compute", "float32", (off,), "the computation")
    if bf16 is not None and is_on(bf16) and (off := surface.edit(bf16, False)) is not None:
        yield _change(f"{bf16.name}=false", "compute", "float32", (off,), "the computation")
    if amp is not None and is_on(amp) and (off := surface.edit(amp, False)) is not None:
        yield _change(f"{amp.name}=false", "compute", "float32", (off,), "the computation")


def _in_code(code: Code) -> Iterator[Change]:
    """Formats written into the code: all casts of one kind in a file together."""
    sites = list(_sites(code))
    for part in ("compute", "weights"):
        for held in ("float16", "bfloat16"):
            here = [s for s in sites if s[0] == part and s[1] == held]
            for target in WIDER[held] if here else ():
                edits = [_rewrite(code, node, call, target) for _, _, node, call in here]
                if all(edits):
                    what = "autocast" if part == "compute" else "weights"
                    yield _change(f"{what} {target}", part, target, tuple(e for e in edits if e), what)


def _sites(code: Code) -> Iterator[tuple[str, str, ast.expr, ast.Call | None]]:
    """Every half format in the code: its part, its format, the expression, the call it stands in."""
    calls: dict[int, ast.Call] = {}
    for node in ast.walk(code.tree):
        if isinstance(node, ast.Call):
            for inner in [*node.args, *(k.value for k in node.keywords)]:
                calls[id(inner)] = node
    for node in ast.walk(code.tree):
        if isinstance(node, ast.Attribute) and code.dotted(node).startswith("torch."):
            held = HALVES.get(node.attr)
            if held is not None:
                call = calls.get(id(node))
                name = code.dotted(call.func) if call is not None else ""
                yield ("compute" if name.endswith("autocast") else "weights"), held, node, call
        elif (cast := _cast(code, node)) is not None:
            yield "weights", HALVES[cast[1]], cast[0], cast[0]


def _cast(code: Code, node: ast.AST) -> tuple[ast.Call, str] | None:
    """``x.half()`` or ``x.bfloat16()``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.args:
        return None
    name = node.func.attr
    return (node, name) if name in ("half", "bfloat16") and not code.dotted(node.func).startswith("torch.") else None


def _rewrite(code: Code, node: ast.expr, call: ast.Call | None, target: str) -> Edit | None:
    span = code.span(node)
    if span is None:
        return None
    text = code.text(node)
    if isinstance(node, ast.Call):  # x.half()
        text = re.sub(r"\.(half|bfloat16)\(\)$", ".bfloat16()" if target == "bfloat16" else ".float()", text)
    elif target == "float32" and call is not None and code.dotted(call.func).endswith("autocast"):
        if any(k.arg == "enabled" for k in call.keywords):
            return None
        text = f"{text}, enabled=False"
    else:
        text = f"{text.rpartition('.')[0]}.{target}"
    return Edit(
        route="file",
        name=code.path,
        text=text,
        start=span[0],
        end=span[1],
        setting=f"dtype at line {node.lineno}",
        before=code.text(node),
    )


def stores_half(surface: Surface) -> bool:
    """Whether weights are stored in float16, as far as code and configs say."""
    in_code = any(part == "weights" and held == "float16" for c in surface.codes for part, held, _, _ in _sites(c))
    return in_code or any(HALVES.get(str(v.value)) == "float16" for v in surface.meaning.all("load_dtype") if v.known)


def pairs(changes: list[Change]) -> list[Change]:
    """Every format of the weights with every format of the computation: each half may die or be useless alone."""
    precise = [c for c in changes if c.kind == "precision" and c.part]
    stored, computed = ([c for c in precise if c.part == part] for part in ("weights", "compute"))
    return [a + b for a in stored for b in computed if a.fits(b)]

"""NP309: a model that is still trained is cast to half precision in place, to save it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..gradients import gradless
from ..names import dotted, last_name, written
from ..rule import Found, Rule
from ..training import calls_in

if TYPE_CHECKING:
    from ..source import Module

_MODEL = re.compile(r"(^|[._])(models?|net|network|ema\w*|\w*_ema|unet|generator|module|net[GD])$", re.I)
_SAVES = re.compile(r"save|ckpt|checkpoint|export|state_dict|push|upload", re.I)


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    func = node.func
    if not isinstance(func, ast.Attribute) or module.is_test or not _to_half(node, module):
        return
    name = written(func.value)
    if not name or not _MODEL.search(name) or _copied(func.value, module):
        return
    if not (module.facts.backward or module.facts.optimizer or module.project.backward):
        return
    if not _to_save(node, module) or _restored(node, name, module) or "unittest" in module.text:
        return
    yield Found(
        node=node,
        message=f"{name}.half() changes the model itself: training goes on with weights rounded to float16",
        help=f"cast a copy: copy.deepcopy({name}).half(), or cast the tensors of the state dict",
    )


def _to_half(node: ast.Call, module: Module) -> bool:
    last = last_name(node)
    if last in ("half", "bfloat16"):
        return not node.args
    return last == "to" and any(
        module.called(a).rpartition(".")[2] in ("float16", "half")
        for a in [*node.args, *(k.value for k in node.keywords)]
    )


def _copied(on: ast.AST, module: Module) -> bool:
    made = [on, *module.origins(on)]
    if isinstance(on, ast.Name) and any(
        isinstance(c.func, ast.Name) and c.func.id[:1].isupper() for m in made for c in calls_in(m)
    ):
        return True  # made here, around the model or for itself
    return any(
        last_name(c) in ("deepcopy", "copy", "clone", "from_pretrained", "load") for m in made for c in calls_in(m)
    )


def _to_save(node: ast.Call, module: Module) -> bool:
    """Whether the cast stands where a checkpoint is written, in a function that is handed the model."""
    scope = module.function(node)
    if gradless(node, module) and not isinstance(scope, ast.FunctionDef):
        return False
    around = [dotted(p.func) for p in module.parents(node) if isinstance(p, ast.Call)]
    above = next((p for p in module.parents(node) if isinstance(p, ast.Attribute)), None)
    if any(_SAVES.search(a) for a in around) or (above is not None and _SAVES.search(above.attr)):
        return True
    return isinstance(scope, ast.FunctionDef) and bool(_SAVES.search(scope.name)) and "load" not in scope.name


def _restored(node: ast.Call, name: str, module: Module) -> bool:
    """Whether the same function casts it back."""
    scope = module.function(node)
    return any(
        written(c.func.value) == name
        for c in module.calls("float")
        if isinstance(c.func, ast.Attribute) and module.function(c) is scope
    )


RULE = Rule(
    code="NP309",
    name="live-model-halved",
    what="Finds `model.half()` where a checkpoint is written, on a model that training goes on with.",
    why="""
`Module.half()` casts the parameters in place and returns the same module. After the first checkpoint the run trains in
float16: small updates are rounded away, Adam's eps is 0, activations overflow. An EMA loses everything below 2^-11 of
each weight, at every save. Casting back with `.float()` does not bring the digits back.
""",
    bad="""
def train(model, optimizer, loader):
    for step, x in enumerate(loader):
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 1000 == 0:
            torch.save(model.half().state_dict(), "model.pt")
""",
    good="""
import copy


def train(model, optimizer, loader):
    for step, x in enumerate(loader):
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 1000 == 0:
            torch.save(copy.deepcopy(model).half().state_dict(), "model.pt")
""",
    false_alarm="The model is saved once, after training has ended.",
    nodes=(ast.Call,),
    calls=frozenset({"half", "bfloat16", "to"}),
    words=("half", "float16", "bfloat16"),
    check=check,
)

"""NP306: Adam on float16 weights with an eps that is zero there."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..names import called_last
from ..rule import Change, Found, Rule
from ..source import Module
from ..training import in_tests, is_true, keyword
from ..weights import ADAMS, trainings

_SMALLEST = 2.0**-24
_EPS = "1e-2"
"""Not below 5.5e-3: where v = 0.001 g² underflows, the step is lr · g / eps, and g is up to 5.5e-3 there."""


def check(node: ast.Module, module: Module) -> Iterator[Found]:
    if in_tests(module):
        return
    told: set[ast.AST] = set()
    for training in trainings(module):
        maker = training.maker
        if training.trainer or training.dtype != "float16" or maker in told or called_last(maker, module) not in ADAMS:
            continue
        if module.facts.scaler or is_true(keyword(maker, "fused")) or not _vanishes(maker):
            continue
        told.add(maker)
        eps = keyword(maker, "eps")
        given = f"eps={module.source(eps)}" if eps is not None else "its default eps of 1e-8"
        yield Found(
            node=maker,
            message=f"`{training.model}` has float16 weights, where {given} is 0: a zero gradient gives 0/0 = NaN",
            help="train float32 weights under autocast, or float32 master weights; if it must be float16, eps=1e-2",
            edits=_fix(module, maker, eps),
        )


def _vanishes(maker: ast.Call) -> bool:
    eps = keyword(maker, "eps")
    if eps is None:
        return all(k.arg is not None for k in maker.keywords)  # **settings may hold one
    return isinstance(eps, ast.Constant) and isinstance(eps.value, int | float) and eps.value < _SMALLEST


def _fix(module: Module, maker: ast.Call, eps: ast.expr | None) -> tuple[Change, ...]:
    if eps is not None:
        return (module.replace(eps, _EPS),)
    last = maker.keywords[-1].value if maker.keywords else maker.args[-1]
    return (module.replace(last, f"{module.source(last)}, eps={_EPS}"),)


RULE = Rule(
    code="NP306",
    name="half-params-adam-eps",
    what="Finds Adam, AdamW and their relatives on float16 weights with an eps below 6e-8 (the default is 1e-8), "
    "without a scaler.",
    why="The smallest positive float16 is 2⁻²⁴ = 6e-8; 1e-8 is stored as 0. Adam divides by √v + eps: for a weight "
    "with gradient 0 that is 0/0 = NaN, and for a gradient of 1e-3 v = 1e-9 is 0 as well, so the step is −inf. "
    "Measured on torch 2.13, CPU: gradients [0, 1e-3] give weights [nan, -inf]. The usual advice, eps=1e-4, keeps "
    "them finite and makes updates up to 55 times too large: v = 0.001 g² underflows for gradients below 5.5e-3, and "
    "the step is then lr · g / eps. For a gradient of 5e-3 it is 50 times the right one with eps=1e-4, 1.7 times with "
    "3e-3, half of it with 1e-2. Float32 weights have none of this; `fused=True` keeps the step finite, but stores v "
    "in float16, so small gradients still move their weights too far.",
    bad="""import torch

def main(build, loader, criterion):
    model = build().cuda().half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
""",
    good="""import torch

def main(build, loader, criterion):
    model = build().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
""",
    miss="""import torch

def make_optimizer(model):  # the caller has made it float16
    return torch.optim.Adam(model.parameters(), lr=1e-4)
""",
    false_alarm="The optimizer is given float32 copies of the weights. bfloat16 has the range of float32, so it is "
    "not reported.",
    fix="unsafe",
    fix_note="eps becomes 1e-2, the first round number with which no update is too large; small gradients are damped. "
    "Float32 weights under autocast, or float32 master weights, are better.",
    nodes=(ast.Module,),
    words=("half", "float16", "fp16"),
    check=check,
)

"""NP218: Sinkhorn iterations on exponentials overflow and underflow; in log space they do not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import end, start
from ..guards import small_constant
from ..names import called_last, key_of
from ..numerics import QUOTIENTS, division, shifted, summed
from ..rule import Change, Found, Rule
from ..values import core, made_of, operation, scalar, short, trail

if TYPE_CHECKING:
    from ..source import Module

Division = ast.BinOp | ast.AugAssign | ast.Call
Loop = ast.For | ast.While


def check(tree: ast.Module, module: Module) -> Iterator[Found]:
    if module.is_test:
        return
    divisions = [(d, parts, loop) for d, parts, loop in _divisions(module) if loop is not None]
    turns: dict[tuple[Loop, str], list[Division]] = {}
    for part, (above, below), loop in divisions:
        total = _own_sum(below, module) if key_of(above) else None
        if total is not None and key_of(total) == key_of(above):
            turns.setdefault((loop, key_of(above)), []).append(part)
    for (loop, key), found in turns.items():
        if len({_axis(d, module) for d in found}) > 1:
            yield from _report(loop, key, found, module)
    yield from _scalings([(below, loop) for _, (_, below), loop in divisions], module)


def _divisions(module: Module) -> Iterator[tuple[Division, tuple[ast.expr, ast.expr], Loop | None]]:
    """All divisions, with the innermost loop around each."""
    candidates: list[Division] = [n for n in module.nodes(ast.BinOp) if isinstance(n.op, ast.Div)]
    candidates += [n for n in module.nodes(ast.AugAssign) if isinstance(n.op, ast.Div)]
    candidates += module.calls(*QUOTIENTS)
    for part in candidates:
        loop = next((p for p in module.parents(part) if isinstance(p, ast.For | ast.While)), None)
        parts = division(part, module) if loop is not None else None
        if parts is not None:
            yield part, parts, loop


def _report(loop: Loop, key: str, turns: list[Division], module: Module) -> Iterator[Found]:
    begun = _exponential(turns[0], key, loop, module)
    if begun is None:
        return
    yield Found(
        node=begun,
        message=f"Sinkhorn on exponentials: {key} is NaN as soon as an exponent passes 88.7 or a whole row "
        "underflows to 0 (float16: 11.09)",
        help="iterate on logarithms: x - x.logsumexp(dim, keepdim=True), and exp once at the end (ops.sinkhorn)",
        edits=_fix(loop, key, turns, begun, module),
        info=_scaled(begun, module),
    )


def _scaled(exponential: ast.Call, module: Module) -> bool:
    """``exp(similarity / epsilon)``: of cosines and normalized costs, which such a temperature is made for."""
    found = module.operation(exponential)
    at = core(found.operand, module) if found is not None and found.operand is not None else None
    if not isinstance(at, ast.BinOp) or not isinstance(at.op, ast.Div | ast.Mult):
        return False
    return any(scalar(s, module) or small_constant(s, module) for s in (at.left, at.right))


def _own_sum(node: ast.expr, module: Module) -> ast.expr | None:
    """What is summed in a divisor, an eps beside it or not."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return summed(node.left, module)
    return summed(node, module)


def _axis(part: Division, module: Module) -> str:
    parts = division(part, module)
    assert parts is not None
    below = parts[1]
    if isinstance(below, ast.BinOp) and isinstance(below.op, ast.Add):
        below = below.left
    total = operation(core(below, module), module)
    if total is None:
        return module.source(below)
    given = [*total.args[:1], *(v for k, v in total.keywords.items() if k in ("dim", "axis"))]
    return module.source(given[0]) if given else ""


def _exponential(part: Division, key: str, loop: ast.AST, module: Module) -> ast.Call | None:
    """The exponential that the name began with, unless it is shifted or clamped."""
    scope = module.function(loop)
    before = [b.value for b in module.flow.bindings(scope, key) if b.value is not None and b.place < start(loop)]
    for value in reversed(before):
        for inner in trail(value, module):
            if isinstance(inner, ast.Call) and (found := module.operation(inner)) and found.name == "exp":
                return inner if found.operand is not None and not _tame(found.operand, module) else None
    return None


def _tame(exponent: ast.expr, module: Module) -> bool:
    if shifted(exponent, module):
        return True
    return any(
        isinstance(p, ast.Call) and called_last(p, module) in ("clamp", "clip", "clamp_", "tanh", "log_softmax")
        for p in made_of(exponent, module, limit=100)
    )


def _scalings(divisors: list[tuple[ast.expr, Loop]], module: Module) -> Iterator[Found]:
    """``u = a / (K @ v)`` and ``v = b / (K.t() @ u)`` in turn, with K = exp(-cost / reg)."""
    kernels: dict[tuple[Loop, str], int] = {}
    for below, loop in divisors:
        for inner in ast.walk(below):
            for key in _multiplied(inner, module):
                kernels[loop, key] = kernels.get((loop, key), 0) + 1
    for (loop, key), count in kernels.items():
        bindings = module.flow.bindings(module.function(loop), key) if count > 1 else []
        made = [b.value for b in bindings if b.value is not None and b.place < start(loop)]
        at = core(made[-1], module) if made else None
        found = module.operation(at) if at is not None else None
        if (
            at is not None
            and found
            and found.name == "exp"
            and found.operand is not None
            and not _tame(found.operand, module)
        ):
            yield Found(
                node=at,
                message=f"Sinkhorn on exponentials: {key} underflows to 0 where the cost is over 104 times the "
                "regularisation, and a / 0 follows",
                help="iterate on logarithms: u = log_a - torch.logsumexp(v - cost / reg, dim), and exp at the end",
            )


def _multiplied(node: ast.AST, module: Module) -> set[str]:
    """The names in the factors of a matrix product."""
    sides: list[ast.expr] = []
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        sides = [node.left, node.right]
    elif isinstance(node, ast.Call) and called_last(node, module) in ("matmul", "mv", "mm", "bmm"):
        sides = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
    return {key_of(n) for side in sides for n in ast.walk(side)} - {""}


def _fix(loop: Loop, key: str, turns: list[Division], begun: ast.Call, module: Module) -> tuple[Change, ...]:
    """Subtract logsumexp where the sum was divided by; exp once after the loop. Only for the plain form."""
    made = module.statement(begun)
    found = module.operation(begun)
    plain = isinstance(made, ast.Assign) and made.value is begun and found is not None and found.operand is not None
    uses = [u for u in module.uses(key, module.function(loop)) if start(made) < start(u) <= end(loop)]
    if not plain or found is None or found.operand is None or len(uses) != 2 * len(turns) or "." in key:
        return ()
    edits = [module.replace(begun, module.source(found.operand))]
    for part in turns:
        parts = division(part, module)
        total = operation(parts[1], module) if parts else None
        if total is None or total.name != "sum" or total.operand is None or not isinstance(part, ast.BinOp):
            return ()
        if set(total.keywords) - {"dim", "axis", "keepdim", "keepdims"} or not short(total.operand, module):
            return ()
        renamed = {"axis": "dim", "keepdims": "keepdim"}
        args = [module.source(a) for a in total.args]
        args += [f"{renamed.get(k, k)}={module.source(v)}" for k, v in total.keywords.items()]
        edits.append(module.replace(part, f"{key} - {key}.logsumexp({', '.join(args)})"))
    return (*edits, module.insert_after(loop, f"{key} = {key}.exp()"))


RULE = Rule(
    code="NP218",
    name="sinkhorn-in-exp-space",
    what="""
Finds Sinkhorn iterations that normalize the rows and columns of an exponential in turn, and those that scale a kernel
exp(-cost / reg) by two vectors, where the exponent is neither shifted nor clamped.
""",
    why="""
exp(x) is infinite from x = 88.73 on in float32 and bfloat16, and from 11.09 on in float16: one such entry makes its row
∞ / ∞ = NaN, and the columns spread it over the whole matrix in the next half step. Below -104 the exponential is 0,
and a row or column of zeros is 0 / 0. `exp` of [[0, 89], [1, 0]] is all NaN after two turns, value and gradient.

On logarithms each half step is x - logsumexp(x): the largest exponent is subtracted first, and nothing can overflow. An
eps in the divisor does not help against overflow, and clamping the exponent changes the solution.
""",
    bad="""
def doubly_stochastic(logits, turns=20):
    m = torch.exp(logits)
    for _ in range(turns):
        m = m / m.sum(dim=-1, keepdim=True)
        m = m / m.sum(dim=-2, keepdim=True)
    return m
""",
    good="""
def doubly_stochastic(logits, turns=20):
    m = logits
    for _ in range(turns):
        m = m - m.logsumexp(dim=-1, keepdim=True)
        m = m - m.logsumexp(dim=-2, keepdim=True)
    return m.exp()
""",
    miss="""
def rows(m):
    return m / m.sum(dim=-1, keepdim=True)


def doubly_stochastic(logits, turns=20):
    m = torch.exp(logits)
    for _ in range(turns):
        m = rows(rows(m).mT).mT  # the normalization is in another function
    return m
""",
    false_alarm="""
The exponents are bounded, such as cosines divided by a temperature that is not small. Subtracting the largest value
first, `torch.exp(x - x.max())`, costs nothing and says so.
""",
    fix="unsafe",
    fix_note="""
The plain form, `m = torch.exp(x)` and a loop of `m = m / m.sum(...)`, is rewritten on logarithms. Results are the same
to rounding where the old ones were finite.
""",
    nodes=(ast.Module,),
    words=("exp",),
    check=check,
)

"""NP104: a comparison with NaN, which is never true, and repairs of NaN that change nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..names import last_name, written
from ..nonfinite import find_test, is_nan_literal
from ..rule import Change, Found, Rule
from ..source import Module
from ..training import in_tests, keyword

_IN_PLACE = {"zero_", "fill_", "mul_", "copy_", "clamp_", "add_", "masked_fill_", "nan_to_num_"}
_NOT_IN_PLACE = {"nan_to_num", "masked_fill", "clamp", "where"}


def check(node: ast.AST, module: Module) -> Iterator[Found]:
    if in_tests(module):
        return
    if isinstance(node, ast.Compare):
        yield from _compared(node, module)
    elif isinstance(node, ast.Expr):
        yield from _without_effect(node, module)


def _compared(node: ast.Compare, module: Module) -> Iterator[Found]:
    if len(node.ops) != 1:
        return
    left, op, right = node.left, node.ops[0], node.comparators[0]
    if is_nan_literal(module, left) and isinstance(op, ast.Eq | ast.NotEq):
        left, right = right, left
    if isinstance(op, ast.Eq | ast.NotEq) and is_nan_literal(module, right):
        always = "False" if isinstance(op, ast.Eq) else "True"
        yield Found(
            node=node,
            message=f"`{module.source(node)}` is always {always}: NaN is equal to nothing, not even to itself",
            help="use isnan, or isfinite to see Inf as well",
            edits=_fix(module, node, left, op),
            safe=True,
        )
    elif isinstance(op, ast.Is | ast.IsNot) and is_nan_literal(module, right) and not _sentinel(left, right, module):
        yield Found(
            node=node,
            message=f"`{module.source(node)}` asks whether it is that very object, not whether it is NaN",
            help="use isnan, or isfinite to see Inf as well",
        )
    elif isinstance(op, ast.In | ast.NotIn) and any(is_nan_literal(module, e) for e in getattr(right, "elts", ())):
        yield Found(
            node=node,
            message=f"`{module.source(node)}` does not find a computed NaN: NaN is equal to nothing",
            help="use isnan, or isfinite to see Inf as well",
        )


def _sentinel(left: ast.expr, right: ast.expr, module: Module) -> bool:
    """Whether the file itself hands out that very object to say that there is no value: ``return None, torch.nan``."""
    text = module.source(right)
    held = [n for n in module.nodes(ast.Attribute) if isinstance(n.ctx, ast.Load) and module.source(n) == text]
    return any(isinstance(module.parent(n), ast.Return | ast.Assign | ast.Tuple) for n in held)


def _fix(module: Module, node: ast.Compare, operand: ast.expr, op: ast.cmpop) -> tuple[Change, ...]:
    """``math.isnan(x)`` for what is surely a number, ``torch.isnan(x)`` for a gradient or a loss, else ``x != x``."""
    text = module.source(operand)
    negate = isinstance(op, ast.NotEq)
    if isinstance(operand, ast.Call) and (last_name(operand) == "item" or module.called(operand) == "float"):
        name, imports = module.spell("math.isnan")
        return (*imports, module.replace(node, f"not {name}({text})" if negate else f"{name}({text})"))
    if any(isinstance(n, ast.Call) for n in ast.walk(operand)):
        return ()  # it would be computed twice
    if not isinstance(operand, ast.Name | ast.Attribute | ast.Subscript):
        text = f"({text})"
    return (module.replace(node, f"{text} == {text}" if negate else f"{text} != {text}"),)


def _without_effect(node: ast.Expr, module: Module) -> Iterator[Found]:
    value = node.value
    compared = value.left if isinstance(value, ast.Compare) and isinstance(value.ops[0], ast.Eq) else None
    if isinstance(value, ast.Compare) and isinstance(compared, ast.Subscript) and find_test(module, compared.slice):
        yield Found(
            node=node,
            message=f"`{module.source(node)}` compares and throws the answer away: nothing is replaced",
            help="write a single `=`",
            edits=(module.replace(value, f"{module.source(compared)} = {module.source(value.comparators[0])}"),),
        )
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Attribute):
        return
    on = value.func.value
    if value.func.attr in _IN_PLACE and isinstance(on, ast.Subscript) and find_test(module, on.slice):
        yield Found(
            node=node,
            message=f"`{module.source(on)}` is a copy, so `{value.func.attr}` changes nothing in `{written(on.value)}`",
            help="assign instead: `x[torch.isnan(x)] = 0`",
        )
    elif value.func.attr in _NOT_IN_PLACE and keyword(value, "out") is None and _about_nan(module, value):
        yield Found(
            node=node,
            message=f"the result of `{module.source(value.func)}` is thrown away: nothing is replaced",
            help="assign the result",
        )


def _about_nan(module: Module, call: ast.Call) -> bool:
    name = last_name(call)
    if name == "nan_to_num":
        first = call.args[0] if call.args else None
        numpy = module.called(call).startswith("numpy.")
        return (not (numpy and keyword(call, "copy") is not None) and first is not None) or not call.args
    return name in ("masked_fill", "where") and any(find_test(module, a) for a in call.args)


RULE = Rule(
    code="NP104",
    name="nan-compare",
    what='Finds comparisons with NaN (`x == float("nan")`, `x != np.nan`, `x is math.nan`, `x in [nan]`), and '
    "repairs without effect: `x[torch.isnan(x)] == 0`, `x[torch.isnan(x)].zero_()`, a `torch.nan_to_num(x)` whose "
    "result nobody takes.",
    why='NaN is not equal to NaN: `float("nan") == float("nan")` is False, `torch.tensor(nan) == nan` is '
    "`tensor(False)`, and `x is np.nan` is False for every NaN that was computed. The test never fires, so a run "
    "with NaN goes on. Indexing with a mask makes a copy: after `a[torch.isnan(a)].zero_()` on [nan, 1] the tensor "
    "is still [nan, 1].",
    bad="""def check(loss):
    if loss.item() == float("nan"):
        raise FloatingPointError("loss is NaN")
""",
    good="""import math

def check(loss):
    if not math.isfinite(loss.item()):
        raise FloatingPointError("loss is not finite")
""",
    miss="""NAN = float("nan")

def check(loss):
    return loss == NAN  # NaN under another name
""",
    false_alarm="Code that shows or tests that NaN is equal to nothing. Files of tests are not looked at.",
    fix="safe",
    fix_note="`x == nan` becomes `math.isnan(x)` or `x != x`, which for every finite number is False as before. "
    "There is no fix for `is`, `in` and thrown-away results; `==` written for `=` is repaired by an unsafe one.",
    nodes=(ast.Compare, ast.Expr),
    words=("nan", "NaN", "NAN"),
    check=check,
)

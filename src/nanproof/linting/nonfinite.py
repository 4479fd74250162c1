"""Tests for NaN and Inf in whatever words: what is tested, and which answer means that it is bad.

>>> from .source import Module
>>> def bad_when(text):
...     module = Module.parse(f"import math, torch\\nif {text}: pass\\n")
...     test = find_test(module, module.tree.body[1].test)
...     return test and (test.bad, [module.source(o) for o in test.operands], sorted(test.kinds))
>>> bad_when("not math.isfinite(loss.item())")
(True, ['loss.item()'], ['finite'])
>>> bad_when("loss == loss and step > 3")
(False, ['loss'], ['nan'])
>>> bad_when("torch.isnan(x).sum() > 0 or torch.isinf(x).any()")
(True, ['x', 'x'], ['inf', 'nan'])
>>> bad_when("loss > 3")
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

from .names import called_last, key_of, last_name, word_set, written
from .training import CLIPS, calls_in, is_clip, is_collective, loss_like, names_in, origins

if TYPE_CHECKING:
    from .source import Module

Subject = Literal["loss", "gradient", "parameter", "other"]

_TESTS = {"isnan": "nan", "isinf": "inf", "isfinite": "finite", "isneginf": "inf", "isposinf": "inf", "isna": "nan"}
NAN_WORDS = ("nan(", "isfinite", "isinf", "nan_to_num", "finite(", "_nan")
"""A file that tests for non-finite values has one of these in its text."""
_THROUGH = word_set("""any all item sum bool max min cpu numpy float int tolist mean detach squeeze count_nonzero""")
_HELPER = re.compile(
    r"(^|_)(has|is|any|all|check|contains?|detect|found|exists?|assert|validate|verify|test)?_?"
    r"(nan|nans|inf|infs|nonfinite|non_finite|finite|naninf|invalid_grad\w*|valid_grad\w*|bad_grad\w*|bad_loss|overflow)"
    r"(_|$|or|and)",
    re.IGNORECASE,
)
_CHECKER = re.compile(
    r"^_?(check|assert|validate|verify|ensure|raise_if)_?\w*(nan|inf|finite|loss|grad)", re.IGNORECASE
)
_HELPER_GOOD = re.compile(r"(?<!non)(?<!non_)(?<!not_)(?<!in)(?<!un)finite|(?<!in)valid", re.IGNORECASE)


_DEEPEST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NanTest:
    """A condition that asks whether values are NaN or Inf."""

    bad: bool
    """The answer that means: not finite."""
    operands: tuple[ast.expr, ...]
    kinds: frozenset[str]
    """What it can see: "nan", "inf", "finite" (both), "helper" (a function of another file, so unknown); and "agreed"
    when a function of this file asks all ranks before it answers, "flag" when it is a variable set after a test."""
    calls: tuple[ast.Call, ...] = ()
    """The calls of isnan and the like in it."""


_KNOWN: WeakKeyDictionary[Module, dict[tuple[ast.AST, int], NanTest | None]] = WeakKeyDictionary()


def find_test(module: Module, node: ast.AST) -> NanTest | None:
    """The test for non-finite values that a condition is, or None."""
    return _find(module, node, _DEEPEST)


def _find(module: Module, node: ast.AST, depth: int) -> NanTest | None:
    if depth == 0:
        return None
    known = _KNOWN.setdefault(module, {})
    key = (node, depth)
    if key not in known:
        known[key] = None  # a name that is made of itself
        known[key] = _look(module, node, depth)
    return known[key]


def _look(module: Module, node: ast.AST, depth: int) -> NanTest | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        inner = _find(module, node.operand, depth)
        return replace(inner, bad=not inner.bad) if inner else None
    if isinstance(node, ast.BoolOp):
        return _joined([t for v in node.values if (t := _find(module, v, depth))])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr | ast.BitAnd | ast.Add):
        return _joined([t for v in (node.left, node.right) if (t := _find(module, v, depth))])
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compared(module, node, node.ops[0], node.comparators[0], depth)
    if isinstance(node, ast.GeneratorExp | ast.ListComp):
        return _find(module, node.elt, depth)
    if isinstance(node, ast.NamedExpr):
        return _find(module, node.value, depth)
    if isinstance(node, ast.Call):
        return _called(module, node, depth)
    if isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and written(node).startswith("self.")):
        return _named(module, node, depth)
    if isinstance(node, ast.Subscript):
        return _find(module, node.value, depth)
    return None


def _joined(tests: list[NanTest]) -> NanTest | None:
    if not tests:
        return None
    return NanTest(
        bad=tests[0].bad,
        operands=tuple(o for t in tests for o in t.operands),
        kinds=frozenset(k for t in tests for k in t.kinds),
        calls=tuple(c for t in tests for c in t.calls),
    )


def _compared(module: Module, node: ast.Compare, op: ast.cmpop, right: ast.expr, depth: int) -> NanTest | None:
    left = node.left
    if isinstance(op, ast.NotEq | ast.Eq) and isinstance(left, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
        if ast.dump(left) == ast.dump(right):
            return NanTest(bad=isinstance(op, ast.NotEq), operands=(left,), kinds=frozenset({"nan"}))
        if is_infinity(module, right) and isinstance(op, ast.Eq):
            return NanTest(bad=True, operands=(left,), kinds=frozenset({"inf"}))
    if isinstance(op, ast.In) and isinstance(left, ast.Constant) and left.value is True:
        return _find(module, right, depth)
    inner = _find(module, left, depth)
    if inner is None or not isinstance(right, ast.Constant):
        return None
    same = (
        isinstance(op, ast.Gt | ast.GtE | ast.NotEq) if not right.value else isinstance(op, ast.Eq | ast.Is | ast.GtE)
    )
    return inner if same else replace(inner, bad=not inner.bad)


def _called(module: Module, call: ast.Call, depth: int) -> NanTest | None:
    name = called_last(call, module)
    func = call.func
    if name in _TESTS:
        module_form = bool(module.called(call)) or not isinstance(func, ast.Attribute)
        if module_form and not call.args:
            return None
        operand = call.args[0] if module_form or call.args else func.value if isinstance(func, ast.Attribute) else None
        if operand is None:
            return None
        return NanTest(bad=name != "isfinite", operands=(operand,), kinds=frozenset({_TESTS[name]}), calls=(call,))
    if name in _THROUGH:
        if isinstance(func, ast.Attribute) and not module.called(call):
            return _find(module, func.value, depth)
        return _find(module, call.args[0], depth) if call.args else None
    own = _own_helper(module, call, name, depth)
    if own is not None:
        return own
    if _HELPER.search(name) and (call.args or isinstance(func, ast.Attribute)):
        bad = not _HELPER_GOOD.search(name)
        return NanTest(bad=bad, operands=tuple(call.args), kinds=frozenset({"helper"}))
    return None


def is_checker(call: ast.Call) -> bool:
    """Whether a call asks, by its name, that something be finite: ``check_nan(loss)``, ``assert_finite(grads)``."""
    return bool(_CHECKER.search(last_name(call))) and bool(call.args)


def checked(module: Module, node: ast.AST) -> NanTest | None:
    """What is checked by a function that stands as a statement: it raises when that is bad."""
    if not isinstance(node, ast.Call) or not is_checker(node):
        return None
    return NanTest(bad=True, operands=tuple(node.args), kinds=frozenset({"helper"}))


def _own_helper(module: Module, call: ast.Call, name: str, depth: int) -> NanTest | None:
    """A function of this file that answers whether something is bad."""
    if not isinstance(call.func, ast.Name) and written(call.func).partition(".")[0] not in ("self", "cls"):
        return None
    function = next((f for f in module.nodes(ast.FunctionDef) if f.name == name), None)
    if function is None or not any(module.function(c) is function for c in module.calls(*_TESTS)):
        return None
    for node in ast.walk(function):
        if not isinstance(node, ast.Return) or node.value is None or module.function(node) is not function:
            continue
        answer = node.value.elts[0] if isinstance(node.value, ast.Tuple) and node.value.elts else node.value
        if isinstance(answer, ast.Constant) and isinstance(answer.value, bool):
            found = _set_under(module, answer, depth)
            found = replace(found, bad=answer.value) if found else None
        else:
            found = _find(module, answer, depth - 1)
        if found:
            agreed = {"agreed"} if any(is_collective(c, module) for c in calls_in(function)) else set()
            passed = tuple(call.args) if subject_of(module, found) != "gradient" else found.operands
            return replace(found, operands=passed, kinds=found.kinds | agreed, calls=())
    return None


def _named(module: Module, node: ast.expr, depth: int) -> NanTest | None:
    """A flag: assigned from a test, or set where one has answered."""
    for value in module.values(node):
        if isinstance(value, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Call | ast.BinOp | ast.GeneratorExp):
            found = _find(module, value, depth - 1)
            if found:
                return found
    for value in module.values(node):
        if isinstance(value, ast.Constant) and isinstance(value.value, bool):
            found = _set_under(module, value, depth)
            if found:
                return replace(found, bad=value.value, kinds=found.kinds | {"flag"})
    for binding in module.flow.bindings(module.function(node), key_of(node)):
        if isinstance(binding.owner, ast.AugAssign):
            found = _set_under(module, binding.owner, depth)
            if found:
                return replace(found, bad=True, kinds=found.kinds | {"flag"})
    return None


def _set_under(module: Module, node: ast.AST, depth: int) -> NanTest | None:
    """The test in whose bad branch a flag is set."""
    statement = module.statement(node)
    above: ast.AST = statement
    for outer in module.parents(statement):
        if isinstance(outer, ast.If):
            found = _find(module, outer.test, depth - 1)
            if found:
                in_body = any(s is above for s in outer.body)
                return found if in_body == found.bad else None
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        above = outer
    return None


def is_infinity(module: Module, node: ast.AST) -> bool:
    """``float("inf")``, ``math.inf``, ``np.inf``, ``torch.inf``."""
    if isinstance(node, ast.UnaryOp):
        return is_infinity(module, node.operand)
    return _literal(module, node, ("inf", "infinity", "-inf", "+inf"), ("inf", "Inf", "infty", "PINF", "NINF"))


def is_nan_literal(module: Module, node: ast.AST) -> bool:
    """``float("nan")``, ``math.nan``, ``np.nan``, ``torch.nan``."""
    return _literal(module, node, ("nan", "-nan"), ("nan", "NaN", "NAN"))


def _literal(module: Module, node: ast.AST, texts: tuple[str, ...], names: tuple[str, ...]) -> bool:
    if isinstance(node, ast.Call) and module.called(node) in (
        "float",
        "numpy.float32",
        "numpy.float64",
        "torch.tensor",
    ):
        one = node.args[0] if len(node.args) == 1 else None
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            return one.value.strip().lower() in texts
        return one is not None and module.called(node) != "float" and _literal(module, one, texts, names)
    root, _, last = module.called(node).rpartition(".")
    return root in ("numpy", "math", "torch") and last in names


def subject_of(module: Module, test: NanTest, losses: frozenset[str] = frozenset()) -> Subject:
    """What a test is about; ``losses`` are the names that are known to be differentiated."""
    found = {_subject(module, operand, losses) for operand in test.operands}
    order: tuple[Subject, ...] = ("gradient", "loss", "parameter")
    return next((s for s in order if s in found), "other")


def _subject(module: Module, operand: ast.expr, losses: frozenset[str]) -> Subject:
    names = list(names_in(operand))
    if any(isinstance(n, ast.Attribute) and n.attr == "grad" for n in ast.walk(operand)):
        return "gradient"
    held = module.value(operand) if isinstance(operand, ast.Name | ast.Attribute) else None
    if isinstance(held, ast.Call) and (called_last(held, module) in CLIPS or is_clip(module, held)):
        return "gradient"
    if isinstance(held, ast.Attribute) and held.attr == "grad":
        return "gradient"
    if any(re.search(r"grad", n.rpartition(".")[2]) for n in names):
        return "gradient"
    if any(isinstance(c, ast.Call) and "grad" in last_name(c) for c in ast.walk(operand)):
        return "gradient"
    if losses & origins(module, operand) or any(loss_like(n) for n in names):
        return "loss"
    if any(re.search(r"param|weight", n) for n in names):
        return "parameter"
    return "other"

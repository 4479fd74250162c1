"""NP204: a division by a standard deviation is 0 / 0 when all values are equal."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import key_of
from ..guards import checked, guarded
from ..numerics import QUOTIENTS, division
from ..purpose import only_logged, trains
from ..rule import Change, Found, Rule
from ..values import called_last, core, cores, made_of, number, operation, short, trail

if TYPE_CHECKING:
    from ..source import Module

_RANDOM = {"randn", "rand", "randn_like", "rand_like"}


def check(node: ast.AST, module: Module) -> Iterator[Found]:
    parts = division(node, module)
    if parts is None:
        return
    numerator, denominator = parts
    spread = _spread(denominator, module)
    if spread is None or only_logged(node, module) or not (trains(node, module) or _advantages(node, spread, module)):
        return
    held = trail(denominator, module)
    keys = {key_of(t) for t in [*held, *trail(spread, module)]} - {""}
    if guarded(denominator, module) or checked(keys, node, module) or _plain_data(numerator, module):
        return
    yield Found(
        node=node,
        message=f"a division by the deviation of {short(spread, module) or 'this'} is NaN when its values are equal",
        help="add an eps to the standard deviation: / (x.std() + 1e-6)",
        edits=_fix(denominator, module),
        about=core(denominator, module),
    )


def _advantages(node: ast.AST, spread: ast.expr, module: Module) -> bool:
    """Advantages of a policy that this class trains: they carry no gradient, and their NaN reaches every weight."""
    klass = module.klass(node)
    if klass is None or module.is_test or not re.search(r"(^|[._])(adv|advantages?)\w*$", module.source(spread)):
        return False
    return any(module.klass(c) is klass for c in module.calls("backward"))


def _spread(node: ast.expr, module: Module) -> ast.expr | None:
    """What the standard deviation is of, if this is one: ``x.std()``, ``x.var().sqrt()``, ``x.var() ** 0.5``."""
    return next((v for at in cores(node, module) if (v := _deviating(at, module)) is not None), None)


def _deviating(at: ast.expr, module: Module) -> ast.expr | None:
    found = operation(at, module)
    if found is None or found.operand is None:
        return None
    name, first, rest = found.name, found.operand, found.args
    if name == "std":
        return first
    if name == "sqrt" or (name == "pow" and rest and number(rest[0], module) == 0.5):
        inner = operation(core(first, module), module)
        return inner.operand if inner and inner.name == "var" else None
    return None


def _plain_data(numerator: ast.expr, module: Module) -> bool:
    """Arrays, and numbers drawn at random: not equal by chance, or nothing that trains."""
    for part in made_of(numerator, module, limit=200):
        if re.search(r"(^|_)(data|dataset|feats?|features)$", key_of(part).rpartition(".")[2]):
            return True
        if isinstance(part, ast.Call):
            if called_last(part, module) in _RANDOM:
                return True
            if module.called(part).partition(".")[0] in ("numpy", "pandas", "scipy"):
                around = {called_last(p, module) for p in module.parents(part) if isinstance(p, ast.Call)}
                if not around & {"tensor", "as_tensor", "from_numpy", "FloatTensor", "Tensor"}:
                    return True
    return False


def _fix(denominator: ast.expr, module: Module) -> tuple[Change, ...]:
    if not isinstance(denominator, ast.Call | ast.Name | ast.Attribute | ast.Subscript):
        return ()
    return (module.replace(denominator, f"({module.source(denominator)} + 1e-6)"),)


RULE = Rule(
    code="NP204",
    name="divide-by-std",
    what="""
Finds a division by a standard deviation, `(x - x.mean()) / x.std()`, in training code, when nothing keeps it from zero.
""",
    why="""
Equal values have the standard deviation 0 and differ from their mean by 0: the result is 0 / 0, NaN, in the value and
in the gradient. Rewards of a group are equal as soon as the model solves, or fails, all of it; activations are equal
when a channel has died; a constant image or a padded sequence is equal everywhere.

An eps in the divisor makes it 0. What an eps does not mend is a single element: the unbiased standard deviation of one
value is 0 / 0 itself, and `(x - x.mean()) / (x.std() + 1e-6)` stays NaN. Use `unbiased=False` where that can happen. In
float16 an eps below 6e-8 is 0.
""",
    bad="""
def policy_loss(log_probs, rewards):
    advantages = (rewards - rewards.mean()) / rewards.std()
    return -(log_probs * advantages).mean()
""",
    good="""
def policy_loss(log_probs, rewards):
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return -(log_probs * advantages).mean()
""",
    miss="""
def policy_loss(log_probs, rewards):
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)  # NaN for a single reward
    return -(log_probs * advantages).mean()
""",
    false_alarm="""
The values cannot be equal, because they contain noise or come from a large data set. Statistics of a data set, NumPy
arrays and random numbers are left alone.
""",
    fix="unsafe",
    fix_note="It adds `1e-6`, which changes results in the seventh digit when the deviation is near 1.",
    nodes=(ast.BinOp, ast.AugAssign, ast.Call),
    calls=QUOTIENTS,
    words=("std", "var"),
    check=check,
)

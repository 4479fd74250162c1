"""Rules as declarations: what to match, where it matters, what makes it harmless, what makes it doubtful.

    RULE = Rule(
        ...,
        match=call("log").of(lambda h: probability(h.operand, h.module) is not None),
        where=training, unless=(guarded, asked, reported), doubt=(constant,),
        message=lambda h: f"the logarithm of {h.said('p')} is -inf where it is zero", edit=add_eps,
    )

A `Match` finds `Hit`s, each with the operand that decides; `of` narrows it: a test keeps or drops a hit, an expression
that it returns is the next operand, a text says why the operand is bad. Tests are plain functions of a hit.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from . import gradients, guards, numerics, purpose
from .names import Operation, key_of, written
from .ranges import range_of
from .training import loss_like
from .values import core, nodes_of, number, operation, scalar, short, trail
from .vanishing import is_constant, squared

if TYPE_CHECKING:
    from .rule import Change
    from .source import Module


@dataclass(frozen=True, slots=True)
class Hit:
    """One place where a rule matches."""

    node: ast.AST
    """What is reported."""
    operand: ast.expr
    """What decides whether it goes wrong: the divisor, what stands under a root."""
    module: Module
    over: ast.expr | None = None
    """What is divided by the operand."""
    why: str = ""
    """What is wrong with the operand, in words."""
    within: ast.expr | None = None
    """The operand before `of` has narrowed it."""

    def said(self, otherwise: str) -> str:
        """The operand for a message, if it is short."""
        return short(self.operand, self.module) or otherwise

    @property
    def outer(self) -> ast.expr:
        return self.within if self.within is not None else self.operand

    @property
    def keys(self) -> set[str]:
        """The names that the operand has on its way."""
        return {key_of(t) for e in (self.outer, self.operand) for t in trail(e, self.module)} - {""}


Test = Callable[[Hit], bool]
Answer = bool | str | ast.expr | None
Edits = Callable[[Hit], "tuple[Change, ...]"]


@dataclass(frozen=True, slots=True)
class Match:
    """A kind of place in the code, and how to find the operand there."""

    find: Callable[[ast.AST, Module], Iterator[Hit]]
    nodes: tuple[type[ast.AST], ...]
    calls: frozenset[str] = frozenset()

    def of(self, *tests: Callable[[Hit], Answer]) -> Match:
        """Only hits whose operand passes every test; what a test returns may be the next operand, or the reason."""
        return replace(self, find=partial(_narrowed, self.find, tests))


def _narrowed(
    find: Callable[[ast.AST, Module], Iterator[Hit]],
    tests: tuple[Callable[[Hit], Answer], ...],
    node: ast.AST,
    module: Module,
) -> Iterator[Hit]:
    for hit in find(node, module):
        for test in tests:
            answer = test(hit)
            if isinstance(answer, ast.expr):
                hit = replace(hit, operand=answer, within=hit.outer)
            elif isinstance(answer, str) and answer:
                hit = replace(hit, why=answer)
            elif not answer:
                break
        else:
            yield hit


def call(*names: str) -> Match:
    """An operation with one of these names, in function or method form; the operand is what it is taken of."""
    wanted = frozenset(names)

    def find(node: ast.AST, module: Module) -> Iterator[Hit]:
        found = module.operation(node)
        if found is not None and found.name in wanted and found.operand is not None:
            yield Hit(node, found.operand, module)

    return Match(find, (ast.Call,), wanted)


def quotient() -> Match:
    """A division, however it is written; the operand is the divisor."""

    def find(node: ast.AST, module: Module) -> Iterator[Hit]:
        parts = numerics.division(node, module)
        if parts is not None:
            yield Hit(node, parts[1], module, over=parts[0])

    return Match(find, (ast.Div,))


def power(fits: Callable[[float], bool], *roots: str) -> Match:
    """A power with a fixed exponent that fits, or one of these roots; the operand is the base."""

    def find(node: ast.AST, module: Module) -> Iterator[Hit]:
        found = operation(node, module)
        if found is None or found.operand is None:
            return
        exponent = number(found.args[0], module) if found.name in ("pow", "pow_") and found.args else None
        if found.name in roots or (exponent is not None and fits(exponent) and not scalar(found.operand, module)):
            yield Hit(node, found.operand, module)

    return Match(find, (ast.Call, ast.BinOp), frozenset({*roots, "pow", "pow_"}))


# --- what an operand is -----------------------------------------------------------------------------------------------


def held(hit: Hit) -> Operation | None:
    """The operation that the operand is, names and shapes followed."""
    return operation(core(hit.operand, hit.module), hit.module)


def exponent(hit: Hit) -> ast.expr | None:
    """The exponent, if the operand is an exponential."""
    found = held(hit)
    return found.operand if found is not None and found.name == "exp" else None


# --- where it matters -------------------------------------------------------------------------------------------------


def training(hit: Hit) -> bool:
    """In a loss, a forward pass or a training step."""
    return purpose.trains(hit.node, hit.module)


def not_aside(hit: Hit) -> bool:
    """Anywhere but in metrics, logging, sampling, data and places without gradients."""
    return not purpose.aside(hit.node, hit.module)


def in_loss(hit: Hit) -> bool:
    return purpose.in_loss(hit.node, hit.module)


def in_network(hit: Hit) -> bool:
    klass = hit.module.klass(hit.node)
    return klass is not None and purpose.is_network(klass, hit.module)


def outside_loss(hit: Hit) -> bool:
    return not purpose.in_loss(hit.node, hit.module)


# --- what makes it harmless, or doubtful ------------------------------------------------------------------------------


def guarded(hit: Hit) -> bool:
    """Kept away from zero: an eps, a lower bound, a replacement of zeros."""
    return guards.guarded(hit.outer, hit.module)


def asked(hit: Hit) -> bool:
    """A test before it asks about the operand, or about what it counts."""
    counted = numerics.summed(hit.operand, hit.module)
    keys = {key_of(t) for t in trail(counted, hit.module)} - {""} if counted is not None else set()
    return guards.checked(hit.keys | keys, hit.node, hit.module)


def asked_about_parts(hit: Hit) -> bool:
    """A test before it asks about the operand, or about anything that it is written with."""
    parts = (hit.outer, hit.operand, core(hit.outer, hit.module))
    keys = {key_of(n) for e in parts for n in ast.walk(e)} - {""}
    return guards.checked(hit.keys | keys, hit.node, hit.module)


def reported(hit: Hit) -> bool:
    """Only logged, never trained on."""
    return purpose.only_logged(hit.node, hit.module)


def constant(hit: Hit) -> bool:
    """Made of numbers, sizes, buffers, grids and schedules alone."""
    return gradients.constant(hit.operand, hit.module) or is_constant(hit.operand, hit.module)


_REPORTED = re.compile(r"(^|_)(report\w*|logged|logging|display\w*|running)(_|$)")


def of_loss(hit: Hit) -> bool:
    """Whether a loss is divided: its name is above the line or is given to the result, or it is summed up."""
    module, owner, above = hit.module, hit.module.statement(hit.node), hit.over or hit.operand
    stored = getattr(owner, "targets", [getattr(owner, "target", None)])
    named = [written(n) for t in [*trail(above, module), *stored] if t is not None for n in ast.walk(t)]
    if any(loss_like(n) and not _REPORTED.search(n) for n in named if n):
        return True
    at = core(above, module)
    given = [k.value for k in at.keywords if k.arg == "reduction"] if isinstance(at, ast.Call) else []
    return any(isinstance(g, ast.Constant) and g.value == "sum" for g in given)


def written_into(hit: Hit) -> bool:
    """Something is written into the operand before: ``n[n == 0] = 1``."""
    return any(key_of(t) and guards.changed_in_place(t, hit.module) for t in trail(hit.outer, hit.module))


def in_test(hit: Hit) -> bool:
    return hit.module.is_test


def reaches_zero(hit: Hit) -> str:
    """What makes the operand exactly zero, in words."""
    return range_of(hit.operand, hit.module).zero


def unproved(hit: Hit) -> bool:
    """Whether the code in sight does not show the hazard: the one test that makes an info of a warning.

    A warning needs all of it: a gradient comes to the operand, and it reaches zero by itself (a ReLU, a mask,
    saturation) or is one of many lengths and variances in a loss, in a network, or where an eps came too late.
    """
    module, zero = hit.module, range_of(hit.operand, hit.module)
    if any(isinstance(p, ast.Lambda) for p in module.parents(hit.node)):
        return True  # what it is called with comes from where nobody can look
    if not (gradients.learned(hit.operand, module) or (hit.over is not None and gradients.learned(hit.over, module))):
        return True
    total = numerics.reduction(core(hit.operand, module), module)
    if total is not None and not (total.args or {"dim", "axis"} & set(total.keywords)):
        return True  # zero only where all of a batch is
    if zero.sure:
        return False
    if not _of_features(hit):
        return True  # one number for a whole batch, or of what nobody reduced
    return not (in_loss(hit) or in_network(hit) or (module.klass(hit.node) is None and _raised_later(hit)))


def _of_features(hit: Hit) -> bool:
    """The length of each vector, of which one may be zero; or a variance by subtraction, which rounding makes zero."""
    module, found = hit.module, held(hit) or numerics.reduction(core(hit.operand, hit.module), hit.module)
    if found is None or found.operand is None:
        return False
    if squared(hit.operand, module) or (found.name == "sub" and found.args and squared(found.args[0], module)):
        return True
    if found.name == "add" and found.args:  # the magnitude of a complex number, the length of a slope
        placed = in_network(hit) or in_loss(hit)
        return placed and all(squared(e, module) for e in (found.operand, found.args[0]))
    reduced = found.name in ("sum", "mean") and bool(found.args or {"dim", "axis"} & set(found.keywords))
    return found.name == "var" or (reduced and squared(found.operand, module))


def repaired(hit: Hit) -> bool:
    """What comes out is looked after: infinities replaced, or written into."""
    module, owner = hit.module, hit.module.statement(hit.node)
    keys = {key_of(t) for t in getattr(owner, "targets", [getattr(owner, "target", None)]) if t is not None} - {""}
    scope = module.function(hit.node)
    if any(key_of(n) in keys and guards.changed_in_place(n, module) for k in keys for n in module.uses(k, scope)):
        return True
    calls = module.calls("isinf", "isnan", "isfinite", "nan_to_num", "nan_to_num_", "masked_fill", "masked_fill_")
    near = [c for c in calls if module.function(c) is scope]
    return any(key_of(n) in keys or n is hit.node for c in near for n in ast.walk(c))


def _raised_later(hit: Hit) -> bool:
    """``sqrt(s) + eps``: zero was thought of, at the wrong place."""
    module, owner = hit.module, hit.module.statement(hit.node)
    places: list[ast.AST] = [hit.node]
    if isinstance(owner, ast.Assign) and owner.value is hit.node and key_of(owner.targets[0]):
        places += module.uses(key_of(owner.targets[0]), module.function(hit.node))
    for place in places:
        above = module.parent(place)
        if isinstance(above, ast.BinOp) and isinstance(above.op, ast.Add):
            other = above.right if above.left is place else above.left
            if guards.small_constant(other, module):
                return True
    return False


def tested(hit: Hit) -> bool:
    """A test before it asks about anything that the operand is written with."""
    keys = hit.keys | {key_of(n) for n in ast.walk(hit.operand)} - {"", "self"}
    return guards.checked(keys, hit.node, hit.module)


def data_by_name(hit: Hit) -> bool:
    """Made of schedules, coordinates, weights or targets alone, by their names, and of nothing learned."""
    if range_of(hit.operand, hit.module).sure:
        return False
    parts = nodes_of(hit.operand, indices=False), nodes_of(core(hit.operand, hit.module), indices=False)
    near = {key_of(n).rpartition(".")[2] for nodes in parts for n in nodes} - {"", "self", *hit.module.aliases}
    near = {n for n in near if n not in hit.keys} or near
    differs = any(isinstance(n, ast.Sub) for n in ast.walk(hit.operand))
    if len(near) > 1 and near <= {"x", "y", "z"} and not differs:
        return True  # the length of a point
    return bool(near) and all(gradients.given_by_name(n) for n in near)


# --- what to write instead --------------------------------------------------------------------------------------------


def replaced(text: str, *kinds: type[ast.expr]) -> Edits:
    """Put a text in the place of the outer operand, which it names ``{x}``, if that is one of these kinds."""

    def edit(hit: Hit) -> tuple[Change, ...]:
        if kinds and not isinstance(hit.outer, kinds):
            return ()
        return (hit.module.replace(hit.outer, text.format(x=hit.module.source(hit.outer))),)

    return edit

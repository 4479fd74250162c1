"""The ways through a training loop: what happens in which order on each of them.

A function is followed statement by statement; calls of functions and methods of the same file are followed into; each
`if` makes two ways, and a condition that comes again has the answer it had before. All conditions about mixed
precision (``use_amp``, ``scaler is not None``, ``args.fp16``) count as one, because they are one in practice.

>>> from .source import Module
>>> module = Module.parse('''
... def train(model, loader, optimizer, scaler, use_amp):
...     for x in loader:
...         loss = model(x)
...         if use_amp:
...             scaler.scale(loss).backward()
...         else:
...             loss.backward()
...         if scaler is not None:
...             scaler.step(optimizer)
...         else:
...             optimizer.step()
... ''')
>>> for way in ways_of(module, module.tree.body[0]):
...     print([event.kind for event in way])
['scaled', 'scaler-step']
['backward', 'step']
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .callees import Callees, Function
from .events import Event, event_of
from .names import written
from .nonfinite import NanTest, checked, find_test, is_checker
from .training import is_exit, origins

if TYPE_CHECKING:
    from .source import Module, Scope


_MOST_WAYS = 64
_DEEPEST = 4
_AMP = re.compile(r"amp\b|_amp|amp_|fp16|float16|scaler|half|mixed|autocast|precision", re.IGNORECASE)
_BF16 = re.compile(r"bf16|bfloat16", re.IGNORECASE)


Way = tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class _Way:
    events: Way = ()
    answers: tuple[tuple[str, bool], ...] = ()
    end: str = ""

    def then(self, events: Way) -> _Way:
        return replace(self, events=self.events + events) if events else self


def ways_of(module: Module, scope: Scope) -> list[Way]:
    """Every way through a function, or through the code outside of all functions, as far as something happens on it."""
    kept = vars(module)  # with the module, so that it goes when the module goes
    if "ways" not in kept:
        kept["ways"] = _Tracer(module)
    tracer: _Tracer = kept["ways"]
    return tracer.ways(scope)


def scopes(module: Module) -> Iterator[Scope]:
    """The code outside of functions, and every function."""
    yield module.tree
    functions: list[Function] = [*module.nodes(ast.FunctionDef), *module.nodes(ast.AsyncFunctionDef)]
    yield from (f for f in functions if not f.name.startswith("test_"))


def all_ways(module: Module) -> Iterator[Way]:
    """The ways through every function of a file in which anything is differentiated."""
    if not module.calls("backward", "manual_backward"):
        return
    for scope in scopes(module):
        yield from ways_of(module, scope)


class _Tracer:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._done: dict[ast.AST, list[Way]] = {}
        self._inner: dict[ast.AST, list[_Way]] = {}
        self._open: set[ast.AST] = set()
        self._callees = Callees(module)
        self._batches = {
            loop
            for call in module.calls("backward", "manual_backward")
            for loop in module.parents(call)
            if isinstance(loop, ast.For | ast.AsyncFor | ast.While)
        }

    def ways(self, scope: Scope) -> list[Way]:
        if isinstance(scope, ast.Lambda) or scope not in self._callees.eventful:
            return []
        if scope not in self._done:
            if isinstance(scope, ast.Module):
                ways = self._block(scope.body, [_Way()], None, 0)
            else:
                ways = self._followed(scope, 0)
            self._done[scope] = [way for way in dict.fromkeys(w.events for w in ways) if way]
        return self._done[scope]

    def _followed(self, function: Function, depth: int) -> list[_Way]:
        if function in self._inner:
            return self._inner[function]
        if function in self._open or depth > _DEEPEST:
            return []
        self._open.add(function)
        ways = self._block(function.body, [_Way()], None, depth)
        self._open.discard(function)
        if depth <= 1:
            self._inner[function] = ways
        return ways

    # --- statements -----------------------------------------------------------------------------------------------

    def _block(self, block: list[ast.stmt], ways: list[_Way], loop: ast.AST | None, depth: int) -> list[_Way]:
        for statement in block:
            going = [w for w in ways if not w.end]
            if not going:
                break
            ended = [w for w in ways if w.end]
            ways = ended + self._statement(statement, going, loop, depth)
            if len(ways) > _MOST_WAYS:
                ways = _shortened(ways)
        return ways

    def _statement(self, node: ast.stmt, ways: list[_Way], loop: ast.AST | None, depth: int) -> list[_Way]:
        if isinstance(node, ast.If):
            return self._branch(node, ways, loop, depth)
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            head = node.test if isinstance(node, ast.While) else node.iter
            ways = self._expression(head, ways, loop, depth)
            inner = node if node in self._batches else loop
            ways = [_past(w, ("continue", "break")) for w in self._block(node.body, ways, inner, depth)]
            return self._block(node.orelse, ways, loop, depth)
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                ways = self._expression(item.context_expr, ways, loop, depth)
            return self._block(node.body, ways, loop, depth)
        if isinstance(node, ast.Try):
            ways = self._block(node.body, ways, loop, depth)
            ways = self._block(node.orelse, ways, loop, depth)
            return self._block(node.finalbody, ways, loop, depth)
        if isinstance(node, ast.Assert):
            return self._asserted(node, node.test, ways, loop, depth)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
            return ways
        if isinstance(node, ast.Match):
            return [w for case in node.cases for w in self._block(case.body, ways, loop, depth)]
        call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        if call is not None and is_checker(call) and self._callees.of(call) is None:
            return self._asserted(node, call, ways, loop, depth)
        for expression in ast.iter_child_nodes(node):
            if isinstance(expression, ast.expr):
                ways = self._expression(expression, ways, loop, depth)
        end = {ast.Return: "return", ast.Raise: "raise", ast.Continue: "continue", ast.Break: "break"}.get(type(node))
        return [w if w.end else replace(w, end=end) for w in ways] if end else ways

    def _branch(self, node: ast.If, ways: list[_Way], loop: ast.AST | None, depth: int) -> list[_Way]:
        test = find_test(self._module, node.test)
        if test is None:
            ways = self._expression(node.test, ways, loop, depth)
        yes, no = self._test_events(node, test, loop)
        key, positive = _condition(node.test, self._module)
        found: list[_Way] = []
        for way in ways:
            if way.end:
                found.append(way)
                continue
            answer = dict(way.answers).get(key)
            before = len(found)
            for taken, block, events in ((True, node.body, yes), (False, node.orelse, no)):
                if answer is not None and (taken == positive) != answer:
                    continue
                started = replace(way.then(events), answers=(*way.answers, (key, taken == positive)))
                found += self._block(block, [started], loop, depth)
            if answer is None and test is None and _same(found[before:], way):
                found[before:] = [way]  # nothing happens on either side: one way
        return found

    def _asserted(
        self, node: ast.stmt, condition: ast.expr, ways: list[_Way], loop: ast.AST | None, depth: int
    ) -> list[_Way]:
        """An assertion, or a call of a function of another file whose name says that it is one."""
        test = find_test(self._module, condition) or checked(self._module, condition)
        if test is None:
            return self._expression(condition, ways, loop, depth)
        yes, no = self._test_events(node, test, loop)
        good, bad = (no, yes) if test.bad else (yes, no)
        return [w for way in ways for w in (way.then(good), replace(way.then(bad), end="raise"))]

    def _test_events(self, node: ast.stmt, test: NanTest | None, loop: ast.AST | None) -> tuple[Way, Way]:
        if test is None:
            return (), ()
        names = frozenset(n for o in test.operands for n in origins(self._module, o))
        roots = frozenset(n for o in test.operands for n in origins(self._module, o, 0))
        event = Event("test", node, names=names, roots=roots, loop=loop, test=test, bad=test.bad)
        return (event,), (replace(event, bad=not test.bad),)

    # --- expressions ----------------------------------------------------------------------------------------------

    def _expression(self, node: ast.expr, ways: list[_Way], loop: ast.AST | None, depth: int) -> list[_Way]:
        for call in _calls_in_order(node):
            followed = self._callees.of(call)
            if followed is not None:
                ways = self._joined(ways, self._followed(followed, depth + 1), call, followed, loop)
                continue
            event = event_of(self._module, call, loop)
            if event is not None:
                if event.kind in ("step", "scaler-step"):
                    ways = self._closure(call, ways, loop, depth)
                ways = [w if w.end else w.then((event,)) for w in ways]
            elif is_exit(self._module, call):
                ways = [w if w.end else replace(w, end="raise") for w in ways]
        return ways

    def _closure(self, call: ast.Call, ways: list[_Way], loop: ast.AST | None, depth: int) -> list[_Way]:
        """The function handed to ``optimizer.step`` runs within it."""
        for argument in call.args:
            if isinstance(argument, ast.Name):
                inner = self._callees.named(argument.id)
                if inner is not None:
                    ways = self._joined(ways, self._followed(inner, depth + 1), call, None, loop)
        return ways

    def _joined(
        self, ways: list[_Way], inner: list[_Way], call: ast.Call, callee: Function | None, loop: ast.AST | None
    ) -> list[_Way]:
        """Each of these ways, continued by each way through a function that is called."""
        given = _given(self._module, call, callee) if callee else {}
        parts = [
            _Way(
                tuple(_in_caller(e, given, loop, call) for e in one.events),
                tuple(pair for pair in one.answers if _shared(pair[0])),
                one.end if one.end == "raise" else "",
            )
            for one in _merged(inner)
        ]
        found = []
        for way in ways:
            fitting = [] if way.end else [p for p in parts if _agree(way, p)]
            found += [_Way(way.events + p.events, way.answers + p.answers, p.end) for p in fitting] or [way]
        return _shortened(found) if len(found) > _MOST_WAYS else found


_Given = dict[str, tuple[frozenset[str], frozenset[str], ast.expr]]


def _given(module: Module, call: ast.Call, callee: Function) -> _Given:
    """For each argument of a function what it stands for in the caller: all names, those written, the expression."""
    parameters = [a.arg for a in (*callee.args.posonlyargs, *callee.args.args)]
    if parameters[:1] in (["self"], ["cls"]):
        parameters = parameters[1:]
    passed = dict(zip(parameters, call.args, strict=False)) | {k.arg: k.value for k in call.keywords if k.arg}
    return {p: (origins(module, a), origins(module, a, 0), a) for p, a in passed.items()}


def _in_caller(event: Event, given: _Given, loop: ast.AST | None, call: ast.Call) -> Event:
    names = frozenset(m for n in event.names for m in (given[n][0] if n in given else {n}))
    roots = frozenset(m for n in event.roots for m in (given[n][1] if n in given else {n}))
    name = written(given[event.name][2]) if event.name in given else event.name
    return replace(event, names=names, roots=roots, name=name, loop=event.loop or loop, site=call)


def _merged(ways: list[_Way]) -> list[_Way]:
    """Ways on which the same happens made one, with the answers that they have in common."""
    found: dict[tuple[Way, str], _Way] = {}
    for way in ways:
        known = found.get((way.events, way.end))
        if known is not None:
            way = replace(way, answers=tuple(pair for pair in known.answers if pair in way.answers))
        found[way.events, way.end] = way
    return list(found.values())


def _agree(way: _Way, part: _Way) -> bool:
    known = dict(way.answers)
    return all(known.get(key, answer) == answer for key, answer in part.answers)


def _shared(key: str) -> bool:
    """Whether a condition means the same in a function and in its caller."""
    return key == "amp" or "self." in key


def _past(way: _Way, ends: tuple[str, ...]) -> _Way:
    return replace(way, end="") if way.end in ends else way


def _same(found: list[_Way], way: _Way) -> bool:
    return all(w.events == way.events and w.end == way.end for w in found)


def _shortened(ways: list[_Way]) -> list[_Way]:
    """Fewer ways: those that differ in what happens, the ones where most happens first."""
    kept = {(w.events, w.end): w for w in reversed(ways)}
    return sorted(kept.values(), key=lambda w: -len(w.events))[:_MOST_WAYS]


def _condition(node: ast.expr, module: Module) -> tuple[str, bool]:
    """What a condition is filed under, and whether its being true is the positive answer to that."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        key, positive = _condition(node.operand, module)
        return key, not positive
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        right = node.comparators[0]
        if isinstance(node.ops[0], ast.Is | ast.Eq | ast.IsNot | ast.NotEq) and isinstance(right, ast.Constant):
            positive = isinstance(node.ops[0], ast.Is | ast.Eq)
            if right.value is None or right.value is False:
                positive = not positive
            if right.value is None or isinstance(right.value, bool):
                key, inner = _condition(node.left, module)
                return key, inner == positive
            text = ast.dump(node.left) + repr(right.value)
            return ("amp" if _is_amp(module.source(node)) else text), positive
    text = module.source(node)
    return ("amp", True) if _is_amp(text) else (text, True)


def _is_amp(text: str) -> bool:
    return bool(_AMP.search(text)) and not _BF16.search(text)


def _calls_in_order(node: ast.AST) -> Iterator[ast.Call]:
    """The calls in an expression, in the order in which they run."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Lambda):
            yield from _calls_in_order(child)
    if isinstance(node, ast.Call):
        yield node

"""Light data flow: which expression a name holds where it is used, as far as the text of one function tells."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from .names import key_of

if TYPE_CHECKING:
    from .source import Module, Scope

Place = tuple[int, int]
_ENDS = (ast.Return, ast.Raise)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


# Calls that give out (values, indices): the first name that they are unpacked into holds the values.
_VALUES_FIRST = {"max", "min", "median", "kthvalue", "mode", "topk", "sort", "cummax", "cummin"}


class Binding(NamedTuple):
    """One place where a name gets a value; ``value`` is None when the text does not say which."""

    owner: ast.stmt
    value: ast.expr | None
    place: Place
    """From here on the name has this value."""


def end(node: ast.AST) -> Place:
    return (node.end_lineno or 0, node.end_col_offset or 0)  # type: ignore[attr-defined]


def start(node: ast.AST) -> Place:
    return (node.lineno, node.col_offset)  # type: ignore[attr-defined]


def _last(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[str, ast.expr | None]]:
    """The names that an assignment binds, each with its value where that can be told."""
    if isinstance(target, ast.Tuple | ast.List):
        known: list[ast.expr] = value.elts if isinstance(value, ast.Tuple | ast.List) else []
        fits = len(known) == len(target.elts) and not any(isinstance(e, ast.Starred) for e in [*known, *target.elts])
        for i, element in enumerate(target.elts):
            first = value if i == 0 and isinstance(value, ast.Call) and _last(value) in _VALUES_FIRST else None
            yield from pairs(element, known[i] if fits else first)
    elif isinstance(target, ast.Starred):
        yield from pairs(target.value, None)
    elif key := key_of(target):
        yield key, value


def _sum(added: ast.AugAssign) -> ast.expr | None:
    """``n + 1e-8`` for ``n += 1e-8``, where the name holds what it held before."""
    if not key_of(added.target):
        return None
    return ast.copy_location(ast.BinOp(left=added.target, op=added.op, right=added.value), added)


class Flow:
    """The bindings of a module, by function and name; built when a rule first asks."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._bindings: dict[ast.AST, dict[str, list[Binding]]] = {}
        self._members: dict[ast.ClassDef, dict[str, list[Binding]]] = {}
        self._values: dict[ast.AST, ast.expr | None] = {}
        for owner, target, value, place in self._assignments():
            for key, held in pairs(target, value):
                self._file(owner, key, held, place)
        for by_name in (*self._bindings.values(), *self._members.values()):
            for found in by_name.values():
                found.sort(key=lambda b: b.place)

    def _assignments(self) -> Iterator[tuple[ast.stmt, ast.expr, ast.expr | None, Place]]:
        nodes = self._module.nodes
        for assign in nodes(ast.Assign):
            for target in assign.targets:
                yield assign, target, assign.value, end(assign)
        for noted in nodes(ast.AnnAssign):
            if noted.value is not None:
                yield noted, noted.target, noted.value, end(noted)
        for added in nodes(ast.AugAssign):
            yield added, added.target, _sum(added), end(added)
        loops: list[ast.For | ast.AsyncFor] = [*nodes(ast.For), *nodes(ast.AsyncFor)]
        for loop in loops:
            yield loop, loop.target, None, end(loop.iter)
        blocks: list[ast.With | ast.AsyncWith] = [*nodes(ast.With), *nodes(ast.AsyncWith)]
        for block in blocks:
            for item in block.items:
                if item.optional_vars is not None:
                    yield block, item.optional_vars, None, end(item.optional_vars)
        for walrus in nodes(ast.NamedExpr):
            yield self._module.statement(walrus), walrus.target, walrus.value, end(walrus)
        for deleted in nodes(ast.Delete):
            for target in deleted.targets:
                yield deleted, target, None, end(deleted)

    def _file(self, owner: ast.stmt, key: str, value: ast.expr | None, place: Place) -> None:
        binding = Binding(owner, value, place)
        scope = self._module.function(owner)
        self._bindings.setdefault(scope, {}).setdefault(key, []).append(binding)
        if key.startswith("self."):
            klass = self._module.klass(owner)
            if klass is not None:
                self._members.setdefault(klass, {}).setdefault(key, []).append(binding)

    def bindings(self, scope: Scope, key: str) -> list[Binding]:
        return self._bindings.get(scope, {}).get(key, [])

    def members(self, klass: ast.ClassDef, key: str) -> list[Binding]:
        return self._members.get(klass, {}).get(key, [])

    def value(self, node: ast.AST) -> ast.expr | None:
        """The one expression that the name holds at this place, or None."""
        try:
            return self._values[node]
        except KeyError:
            found = self._values[node] = self._value(node)
            return found

    def _value(self, node: ast.AST) -> ast.expr | None:
        key = key_of(node)
        if not key or self._shadowed(node, key):
            return None
        scope = self._module.function(node)
        local = self.bindings(scope, key)
        if local:
            reaching = self._reaching(node, local)
            if reaching is not None or not key.startswith("self.") or any(b.place < start(node) for b in local):
                return reaching.value if reaching else None
        if has_argument(scope, key):
            return None
        if key.startswith("self."):
            klass = self._module.klass(node)
            found = self.members(klass, key) if klass else []
        else:
            found = self._outer(scope, key)
        return found[0].value if len(found) == 1 else None

    def origins(self, node: ast.AST) -> list[ast.expr]:
        """Every expression that the name may hold at this place: one from each arm of an ``if`` before it."""
        key = key_of(node)
        if not key or self._shadowed(node, key):
            return []
        local = self.bindings(self._module.function(node), key)
        if local and any(b.place <= start(node) for b in local):
            return [b.value for b in self._alternatives(node, local) if b.value is not None]
        one = self.value(node)
        return [one] if one is not None else self.values(node) if key.startswith("self.") else []

    def _alternatives(self, node: ast.AST, found: list[Binding]) -> list[Binding]:
        """The bindings that can be in force: backwards to the first one that every way leads through."""
        here = start(node)
        ancestors = {node, *self._module.parents(node)}
        chosen: list[Binding] = []
        for binding in reversed([b for b in found if b.place <= here]):
            if self._gone(binding, ancestors):
                continue
            chosen.append(binding)
            if self._dominates(binding, ancestors) or self._other_arm(binding, chosen, ancestors):
                break
        return chosen

    def _other_arm(self, binding: Binding, chosen: list[Binding], ancestors: set[ast.AST]) -> bool:
        """Whether both arms of an ``if`` before the place bind the name, so that nothing earlier is left of it."""
        for outer in self._module.parents(binding.owner):
            if outer in ancestors or isinstance(outer, _LOOPS):
                return False
            if isinstance(outer, ast.If) and outer.orelse:
                arms = [any(self._within(b.owner, arm) for b in chosen) for arm in (outer.body, outer.orelse)]
                if all(arms):
                    return True
        return False

    def _within(self, node: ast.AST, block: list[ast.stmt]) -> bool:
        return any(node is s or self._inside(node, s) for s in block)

    def values(self, node: ast.AST) -> list[ast.expr]:
        """Every expression that the name may hold: all assignments in the function, else those around it."""
        key = key_of(node)
        if not key:
            return []
        scope = self._module.function(node)
        found = self.bindings(scope, key)
        if key.startswith("self."):
            klass = self._module.klass(node)
            found = self.members(klass, key) if klass else found
        elif not found and not has_argument(scope, key):
            found = self._outer(scope, key)
        return [b.value for b in found if b.value is not None]

    def _outer(self, scope: Scope, key: str) -> list[Binding]:
        """The bindings in the nearest function around, or in the module, that has any."""
        while not isinstance(scope, ast.Module):
            scope = self._module.function(scope)
            if found := self.bindings(scope, key):
                return [b for b in found if self._module.klass(b.owner) is None or not isinstance(scope, ast.Module)]
            if has_argument(scope, key):
                return []
        return []

    def _shadowed(self, node: ast.AST, key: str) -> bool:
        for outer in self._module.parents(node):
            if isinstance(outer, _COMPREHENSIONS):
                if any(key == name for g in outer.generators for name, _ in pairs(g.target, None)):
                    return True
            elif isinstance(outer, ast.stmt):
                return False
        return False

    def _reaching(self, node: ast.AST, found: list[Binding]) -> Binding | None:
        """The only binding of these that can be in force at ``node``."""
        here = start(node)
        ancestors = {node, *self._module.parents(node)}
        before = [b for b in found if b.place <= here]
        at = next((i for i in range(len(before) - 1, -1, -1) if self._dominates(before[i], ancestors)), None)
        if at is None:
            return None
        chosen = before[at]
        if any(not self._gone(b, ancestors) for b in before[at + 1 :]):
            return None
        for loop in (a for a in ancestors if isinstance(a, _LOOPS)):
            if chosen.owner is loop or self._inside(chosen.owner, loop):
                continue
            if any(b is not chosen and self._inside(b.owner, loop) for b in found):
                return None  # set later in the loop: the next turn sees that one
        return chosen

    def _dominates(self, binding: Binding, ancestors: set[ast.AST]) -> bool:
        """Whether every way to the node leads through the binding: its block is one of those around the node."""
        owner: ast.AST = binding.owner
        if owner in ancestors:
            return True  # the target of a loop or with, or a := in a condition, seen from the body
        parent = self._module.parent(owner)
        while isinstance(parent, ast.With | ast.AsyncWith):
            owner, parent = parent, self._module.parent(parent)
        if isinstance(owner, ast.For | ast.AsyncFor):
            return False  # after the loop: it may have had no turn
        block = self._block(owner)
        return any(a is not owner and isinstance(a, ast.stmt) and self._block(a) is block for a in ancestors)

    def _gone(self, binding: Binding, ancestors: set[ast.AST]) -> bool:
        """Whether a binding in a branch cannot reach the node: the branch leaves, or is the other one."""
        owner: ast.AST = binding.owner
        for outer in self._module.parents(owner):
            block = self._block(owner)
            if outer in ancestors:
                if not isinstance(outer, ast.If):
                    return False
                mine = next((a for a in ancestors if self._module.parent(a) is outer), None)
                return mine is not None and isinstance(mine, ast.stmt) and self._block(mine) is not block
            if block and isinstance(block[-1], _ENDS):
                return True
            owner = outer
        return False

    def _block(self, statement: ast.AST) -> list[ast.stmt]:
        """The list of statements that this one stands in."""
        parent = self._module.parent(statement)
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            block = getattr(parent, field, None)
            if isinstance(block, list) and any(s is statement for s in block):
                return block
        return []

    def _inside(self, node: ast.AST, outer: ast.AST) -> bool:
        return any(p is outer for p in self._module.parents(node))


def has_argument(scope: Scope, name: str) -> bool:
    if isinstance(scope, ast.Module):
        return False
    a = scope.args
    named = [*a.posonlyargs, *a.args, *a.kwonlyargs, *([a.vararg] if a.vararg else []), *([a.kwarg] if a.kwarg else [])]
    return any(one.arg == name for one in named)

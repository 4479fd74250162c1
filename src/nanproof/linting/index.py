"""One walk over a syntax tree: who is whose parent, and which nodes of which type there are, in source order."""

from __future__ import annotations

import ast

from .names import word_set

# Fields that hold no nodes worth a visit: names, flags, and the operator and context singletons.
_PLAIN = word_set(
    """ctx op ops id attr arg kind n s level lineno type_comment conversion is_async simple module asname
    type_ignores tag rest name kwd_attrs"""
)
_LEAVES = {ast.Constant, ast.Name, ast.alias, ast.Global, ast.Nonlocal, ast.MatchSingleton}


class _Fields(dict[type[ast.AST], tuple[str, ...]]):
    """For each node type its fields that hold nodes, last first."""

    def __missing__(self, kind: type[ast.AST]) -> tuple[str, ...]:
        plain = _PLAIN - {"name"} if kind.__name__ == "TypeAlias" else _PLAIN
        fields = () if kind in _LEAVES else tuple(f for f in reversed(kind._fields) if f not in plain)
        self[kind] = fields
        return fields


_FIELDS = _Fields()

Parents = dict[ast.AST, ast.AST]
Kinds = dict[type[ast.AST], list[ast.AST]]


def walk(tree: ast.AST) -> tuple[Parents, Kinds]:
    """The parent of every node, and all nodes by type.

    >>> parents, kinds = walk(ast.parse("f(g(x))"))
    >>> [call.func.id for call in kinds[ast.Call]]
    ['f', 'g']
    >>> parents[kinds[ast.Call][1]] is kinds[ast.Call][0]
    True
    """
    parents: Parents = {}
    kinds: Kinds = {}
    fields = _FIELDS
    stack = [tree]
    pop, push = stack.pop, stack.append
    while stack:  # by hand, not by recursion: depth is the user's, and this loop is most of the time of a run
        node = pop()
        kind = node.__class__
        try:
            kinds[kind].append(node)
        except KeyError:
            kinds[kind] = [node]
        for field in fields[kind]:
            child = getattr(node, field)
            if child.__class__ is list:
                for one in reversed(child):
                    if one is not None:
                        parents[one] = node
                        push(one)
            elif child is not None:
                parents[child] = node
                push(child)
    return parents, kinds

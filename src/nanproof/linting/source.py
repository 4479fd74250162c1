"""`Module`: one source file as a rule sees it. Every look-up is cheap and built when it is first asked for.

>>> module = Module.parse("import torch as th\\nfrom torch.nn import functional as F\\ny = th.log(F.softmax(x, -1))\\n")
>>> log, softmax = module.nodes(ast.Call)
>>> module.called(softmax), module.operation(log).name, module.source(softmax)
('torch.nn.functional.softmax', 'log', 'F.softmax(x, -1)')
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from . import edit, names
from .flow import Flow, has_argument
from .names import Operation, key_of, word_set
from .project import TORCH, FileFacts, ProjectFacts, lazy_facts
from .rule import Change
from .tree import Scope, Tree

__all__ = ["Module", "Scope"]

_TORCH = tuple(word.decode() for word in TORCH)
_OTHERS = {"mxnet", "tensorflow", "jax", "paddle", "mindspore", "keras", "megengine", "jittor", "chainer", "oneflow"}
_GRADLESS = word_set(
    """torch.no_grad torch.inference_mode torch.autograd.no_grad torch.autograd.inference_mode
    torch.autograd.grad_mode.no_grad torch.autograd.grad_mode.inference_mode"""
)


class Module(Tree):
    """A parsed file; ``Module.parse(text)`` works alone, with its own facts as those of the project."""

    def __init__(
        self,
        text: str,
        tree: ast.Module,
        path: str = "<text>",
        project: Callable[[FileFacts], ProjectFacts] | None = None,
    ) -> None:
        super().__init__(text, tree, path)
        self._project = project
        self.trained_elsewhere: Callable[[str], bool | None] = lambda name: None
        """Whether other files call a function of this one where they train; None when there are no other files."""
        self._called: dict[ast.AST, str] = {}
        self._operations: dict[ast.Call, Operation | None] = {}

    @classmethod
    def parse(cls, text: str, path: str = "<text>") -> Module:
        """Parse a text; raises SyntaxError like `ast.parse`."""
        return cls(text, ast.parse(text, filename=path), path)

    # --- names ----------------------------------------------------------------------------------------------------

    def calls(self, *wanted: str) -> list[ast.Call]:
        """All calls of functions or methods with one of these last names; renamed imports under their true name."""
        return [call for name in wanted for call in self.calls_by_name.get(name, ())]

    @cached_property
    def calls_by_name(self) -> dict[str, list[ast.Call]]:
        """All calls, by the last name of what is called."""
        found: dict[str, list[ast.Call]] = {}
        aliases = self.aliases
        for call in self.nodes(ast.Call):
            func = call.func
            if isinstance(func, ast.Attribute):
                name = func.attr
            elif isinstance(func, ast.Name):
                name = func.id
                if name in aliases:
                    name = aliases[name].rpartition(".")[2]
            else:
                continue
            if name in found:
                found[name].append(call)
            else:
                found[name] = [call]
        return found

    @cached_property
    def divisions(self) -> list[ast.AST]:
        """All divisions, as operators and as calls: many rules are about them, and most operators are none."""
        from .numerics import QUOTIENTS

        operators: list[ast.BinOp | ast.AugAssign] = [*self.nodes(ast.BinOp), *self.nodes(ast.AugAssign)]
        return [*(n for n in operators if isinstance(n.op, ast.Div)), *self.calls(*sorted(QUOTIENTS))]

    @cached_property
    def _imports(self) -> tuple[dict[str, str], list[str]]:
        found, stars = names.imported([*self.nodes(ast.Import), *self.nodes(ast.ImportFrom)])
        for statement in self.tree.body:  # `F = nn.functional` is an alias as well
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Attribute | ast.Name):
                root, _, rest = names.dotted(statement.value).partition(".")
                target = statement.targets[0]
                if isinstance(target, ast.Name) and found.get(root, "").partition(".")[0] == "torch":
                    found.setdefault(target.id, f"{found[root]}.{rest}" if rest else found[root])
        return found, stars

    @property
    def aliases(self) -> dict[str, str]:
        """What each imported name stands for: ``{"F": "torch.nn.functional"}``."""
        return self._imports[0]

    @property
    def top_imports(self) -> list[ast.Import | ast.ImportFrom]:
        """The imports whose names the whole file sees."""
        found: list[ast.Import | ast.ImportFrom] = [*self.nodes(ast.Import), *self.nodes(ast.ImportFrom)]
        return [n for n in found if self.function(n) is self.tree and self.klass(n) is None]

    def called(self, node: ast.AST) -> str:
        """The full dotted name of what is called (or of an expression), aliases followed; "" when unknown.

        Built-in functions have their own name, unless the file gives it to something else.
        """
        target = node.func if isinstance(node, ast.Call) else node
        known = self._called.get(target)
        if known is None:
            known = self._called[target] = self._resolve(target)
        return known

    def _resolve(self, target: ast.AST) -> str:
        written = names.dotted(target)
        root, dot, rest = written.partition(".")
        if not root:
            return ""
        meaning = self.aliases.get(root)
        if meaning is not None:
            return "" if self._rebound(target, root) else meaning + dot + rest
        if dot:
            return ""
        if names.is_builtin(root):
            return "" if root in self._defined else root
        for space in self._imports[1]:
            if space in names.NAMESPACES and root in names.METHODS and root not in self._defined:
                return f"{space}.{root}"
        return ""

    @cached_property
    def _defined(self) -> set[str]:
        """Every name that the file gives to something by other means than an import."""
        made: list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]
        made = [*self.nodes(ast.FunctionDef), *self.nodes(ast.AsyncFunctionDef), *self.nodes(ast.ClassDef)]
        stored = {n.id for n in self.nodes(ast.Name) if not isinstance(n.ctx, ast.Load)}
        return stored | {a.arg for a in self.nodes(ast.arg)} | {d.name for d in made}

    def _rebound(self, node: ast.AST, name: str) -> bool:
        """Whether an imported name means something else here: an argument or a variable of this function."""
        if name not in self._defined:
            return False
        scope = self.function(node)
        while not isinstance(scope, ast.Module):
            if has_argument(scope, name) or self.flow.bindings(scope, name):
                return True
            scope = self.function(scope)
        return False

    def receiver(self, call: ast.Call) -> str:
        """What a method is called on, as written: "self.scaler" for ``self.scaler.step(opt)``, or ""."""
        return names.dotted(call.func.value) if isinstance(call.func, ast.Attribute) else ""

    def operation(self, call: ast.AST) -> Operation | None:
        """One view on function and method form: ``torch.log(x)`` and ``x.log()`` are log of x."""
        if not isinstance(call, ast.Call):
            return None
        try:
            return self._operations[call]
        except KeyError:
            found = self._operations[call] = self._operation(call)
            return found

    def _operation(self, call: ast.Call) -> Operation | None:
        name = self.called(call)
        if name:
            return names.function_form(name, call)
        if not isinstance(call.func, ast.Attribute) or call.func.attr not in names.METHODS:
            return None
        root = self.receiver(call).partition(".")[0]
        if root in self.aliases and not self._rebound(call.func, root):
            return None  # a method of something imported: np.log, logging.log
        return None if self._foreign(call.func.value) else names.method_form(call, root)

    def _foreign(self, node: ast.AST) -> bool:
        """Whether an expression comes out of NumPy or plain mathematics: ``np.log(x).sum()``, or a name for it."""
        at: ast.AST = node
        while True:
            if isinstance(at, ast.Call):
                if self.called(at).partition(".")[0] in ("numpy", "math", "jax", "tensorflow", "pandas", "random"):
                    return True
                at = at.func
            elif isinstance(at, ast.Attribute | ast.Subscript):
                at = at.value
            else:
                break
        if not isinstance(at, ast.Name) or not {"numpy", "math", "pandas"} & self._roots:
            return False
        held = self.value(at)
        return isinstance(held, ast.Call) and self._foreign(held)

    @cached_property
    def _roots(self) -> set[str]:
        return {meaning.partition(".")[0] for meaning in self.aliases.values()}

    # --- flow -----------------------------------------------------------------------------------------------------

    @cached_property
    def flow(self) -> Flow:
        return Flow(self)

    def value(self, node: ast.AST) -> ast.expr | None:
        """The expression that a name (or ``self.x``) holds here, when exactly one assignment can be in force."""
        return self.flow.value(node)

    def values(self, node: ast.AST) -> list[ast.expr]:
        """Every expression that a name (or ``self.x``) is given in its function (or class)."""
        return self.flow.values(node)

    def origins(self, node: ast.AST) -> list[ast.expr]:
        """Every expression that a name may hold here: one from each arm of an ``if``, or from each turn of a loop."""
        return self.flow.origins(node)

    def uses(self, name: ast.AST | str, scope: ast.AST | None = None) -> list[ast.Name]:
        """The places in a scope (by default the whole file) where a name is read."""
        wanted = name if isinstance(name, str) else key_of(name)
        found = self._loads.get(wanted, [])
        if scope is None or isinstance(scope, ast.Module):
            return found
        return [n for n in found if any(p is scope for p in self.parents(n))]

    @cached_property
    def _loads(self) -> dict[str, list[ast.Name]]:
        found: dict[str, list[ast.Name]] = {}
        for node in self.nodes(ast.Name):
            if isinstance(node.ctx, ast.Load):
                found.setdefault(node.id, []).append(node)
        return found

    def under_no_grad(self, node: ast.AST) -> bool:
        """Whether gradients are off here: a with-block or a decorator around it."""
        for outer in self.parents(node):
            around: list[ast.expr] = []
            if isinstance(outer, ast.With | ast.AsyncWith):
                around = [item.context_expr for item in outer.items]
            elif isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                around = outer.decorator_list
            if any(self._gradless(one) for one in around):
                return True
        return False

    def _gradless(self, node: ast.expr) -> bool:
        name = self.called(node)
        if name == "torch.set_grad_enabled" and isinstance(node, ast.Call) and node.args:
            return isinstance(node.args[0], ast.Constant) and node.args[0].value is False
        return name in _GRADLESS

    # --- facts ----------------------------------------------------------------------------------------------------

    @cached_property
    def uses_torch(self) -> bool:
        return any(word in self.text for word in _TORCH)

    @cached_property
    def foreign(self) -> bool:
        """Whether the file is written for another framework and never imports torch or a library on top of it."""
        return bool(self._roots & _OTHERS) and not any(word in root for root in self._roots for word in _TORCH)

    @cached_property
    def is_test(self) -> bool:
        """Whether the file is a test, by its name or by a folder of the project; not by where the project lies."""
        path = Path(self.path)
        if path.name.startswith("test_") or path.stem.endswith("_test") or path.name == "conftest.py":
            return True
        here = Path.cwd()
        below = path.relative_to(here) if path.is_relative_to(here) else path
        folders = below.parts[-2:-1] if below.is_absolute() else below.parts[:-1]
        return "tests" in folders or "test" in folders

    @cached_property
    def facts(self) -> FileFacts:
        """What is in play in this file."""
        return lazy_facts(self)

    @cached_property
    def project(self) -> ProjectFacts:
        """What is in play in all files linted together, this one included."""
        return self._project(self.facts) if self._project else self.facts

    # --- changes --------------------------------------------------------------------------------------------------

    def replace(self, node: ast.AST, text: str) -> Change:
        """Put a text in the place of a node; parentheses are added where they are needed."""
        return edit.replace(self, node, text)

    def insert_before(self, statement: ast.stmt, text: str) -> Change:
        """New lines before a statement, indented like it."""
        return edit.insert_before(self, statement, text)

    def insert_after(self, statement: ast.stmt, text: str) -> Change:
        """New lines after a statement, indented like it."""
        return edit.insert_after(self, statement, text)

    def remove(self, statement: ast.stmt) -> Change:
        """Take a statement out."""
        return edit.remove(self, statement)

    def import_line(self, line: str) -> Change:
        """Add an import; nothing changes if it is there."""
        return edit.import_line(self, line)

    def spell(self, name: str) -> tuple[str, tuple[Change, ...]]:
        """How to write ``torch.nn.functional.softplus`` in this file, and the import that it needs, if any.

        >>> Module.parse("import torch.nn.functional as F\\n").spell("torch.nn.functional.softplus")
        ('F.softplus', ())
        """
        return edit.spell(self, name)

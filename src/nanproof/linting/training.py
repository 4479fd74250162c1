"""What the calls of a training loop mean: who steps, who scales, who clips, who makes the ranks agree.

Names differ from repository to repository, so a thing is known by what it was made from where the file shows that
(``opt = torch.optim.Adam(...)``), and by its name where it does not (an argument called ``optimizer``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING

from .names import called_last, dotted, word_set, written

if TYPE_CHECKING:
    from .source import Module

_OPTIMIZER = re.compile(r"optimi[sz]er|optim|(^|[_.])opt(s|[_0-9A-Z]|$)|[a-z_]Opt$|(^|_)solver$|(^|_)(adamw?|sgd)$")
_NO_OPTIMIZER = re.compile(r"sched|warmup|(^|_)lr(_|$)|option|optional")
_SCALER = re.compile(r"scaler", re.IGNORECASE)
_LOSS = re.compile(r"loss|(^|_)(nll|elbo|cost|objective|obj|criterion|err|error)(_|$|\d)|^l\d?$", re.IGNORECASE)
_CLIP = re.compile(r"clip_?grad|grads?_?clip|gradients?_?clip|clip_?(the_)?gradient|clip_total_grad|clip_by_norm")
_MANAGED = re.compile(r"(^|[._])(accelerator|fabric|engine|model_engine|strategy|trainer|amp|apex|runner)$")
_COLLECTIVE = re.compile(
    r"(^|_)(all_?reduce|all_?gather|reduce|gather|broadcast|allreduce|allgather|sync|synchronize)(_|$|d$|\d)|"
    r"across_(ranks|processes|gpus)|(^|_)(reduced|gathered)(_|$)|^any_rank|^all_ranks"
)
_EXITS = {"sys.exit", "exit", "quit", "os._exit", "os.abort", "os.kill"}

CLIPS = frozenset({"clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grads_with_norm_"})


def keyword(call: ast.Call, *names: str) -> ast.expr | None:
    """The value of the first of these keywords that is given."""
    return next((k.value for k in call.keywords if k.arg in names), None)


def is_true(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def is_false(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def is_none(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def in_tests(module: Module) -> bool:
    """Whether a file is one of tests: by its name or its imports, not by the folder that somebody keeps it in."""
    name = PurePath(module.path).name
    if name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py":
        return True
    return any(meaning.partition(".")[0] in ("pytest", "unittest") for meaning in module.aliases.values())


def detects_anomalies(module: Module) -> bool:
    """Whether autograd is told to raise where a gradient becomes NaN."""
    return bool(re.search(r"detect_anomaly\((True|\))", module.text))


def is_exit(module: Module, call: ast.Call) -> bool:
    """Whether a call ends the process."""
    return module.called(call) in _EXITS


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """All calls in a piece of the tree."""
    return (n for n in ast.walk(node) if isinstance(n, ast.Call))


def is_optimizer(module: Module, node: ast.AST) -> bool:
    """Whether an expression is an optimizer: by what it was made from, else by its name."""
    name = written(node)
    last = name.rpartition(".")[2]
    if not name or _NO_OPTIMIZER.search(last.lower()):
        return False
    made = [v for v in module.values(node) if isinstance(v, ast.Call)]
    if any(module.called(v).startswith("torch.optim.lr_scheduler") for v in made):
        return False
    if any(module.called(v).startswith("torch.optim.") for v in made):
        return True
    return bool(_OPTIMIZER.search(last) or _OPTIMIZER.search(last.lower()))


def is_scaler(module: Module, node: ast.AST) -> bool:
    """Whether an expression is a gradient scaler."""
    if _SCALER.search(written(node).rpartition(".")[2]):
        return True
    return any(isinstance(v, ast.Call) and "GradScaler" in called_last(v, module) for v in module.values(node))


def is_managed(node: ast.AST) -> bool:
    """Whether an expression is the object of a library that runs the step itself: accelerator, fabric, engine."""
    return bool(_MANAGED.search(written(node)))


def loss_like(name: str) -> bool:
    """Whether a name is that of a loss.

    >>> [loss_like(n) for n in ("total_loss", "self.loss_G", "nll", "model", "closs_fn", "loss_fn")]
    [True, True, True, False, False, False]
    """
    last = name.rpartition(".")[2]
    return bool(_LOSS.search(last)) and not re.search(
        r"(fn|func|function|class|type|name|scale|scaler|weight)s?$", last
    )


def is_collective(call: ast.Call, module: Module) -> bool:
    """Whether a call lets the ranks agree on a value."""
    return bool(_COLLECTIVE.search(called_last(call, module).lower()))


def is_clip(module: Module, call: ast.Call) -> bool:
    """Whether a call clips gradients, by its name."""
    name = called_last(call, module)
    return name in CLIPS or bool(
        _CLIP.search(name.lower()) and name[:1].islower() and not name.startswith(("get", "set", "add", "register"))
    )


def limits_gradients(call: ast.Call) -> bool:
    """Whether a call limits a gradient in place: ``p.grad.data.clamp_(-1, 1)``, ``p.grad.mul_(clip_coef)``."""
    func = call.func
    if not isinstance(func, ast.Attribute) or func.attr not in ("clamp_", "clip_", "mul_") or not call.args:
        return False
    on = func.value
    while isinstance(on, ast.Attribute) and on.attr in ("data", "detach"):
        on = on.value
    if not isinstance(on, ast.Attribute) or on.attr != "grad":
        return False
    return func.attr != "mul_" or bool(re.search(r"clip|coef|norm|max_", " ".join(names_in(call.args[0]))))


def names_in(node: ast.AST) -> Iterator[str]:
    """The names and dotted names whose values an expression is made of; functions that are called are left out."""
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute):
            yield from names_in(node.func.value)
        for given in (*node.args, *(k.value for k in node.keywords)):
            yield from names_in(given)
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        text = dotted(node)
        if text:
            yield text
        yield from names_in(node.value)
    elif isinstance(node, ast.Lambda | ast.FunctionDef):
        return
    else:
        for child in ast.iter_child_nodes(node):
            yield from names_in(child)


# Operations through which a value stays what it was, for the question whether it is finite.
_LIGHT = word_set(
    """item detach cpu cuda float double half mean sum clone numpy tolist values div mul add sub abs max min stack
    cat unsqueeze squeeze view reshape flatten to items list tuple norm sqrt any all isnan isinf isfinite bool
    round get copy deepcopy tensor as_tensor"""
)


def origins(module: Module, node: ast.AST, depth: int = 3) -> frozenset[str]:
    """The names that a value comes from, through light operations: ``loss_value`` from ``loss.item()`` is ``loss``."""
    found: set[str] = set()
    _origins(module, node, depth, found)
    return frozenset(found)


def _origins(module: Module, node: ast.AST, depth: int, found: set[str]) -> None:
    if isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and dotted(node)):
        name = dotted(node).removesuffix(".data").removesuffix(".grad")
        if name in found:
            return
        found.add(name)
        if depth:
            for value in module.values(node):
                if _is_light(module, value):
                    _origins(module, value, depth - 1, found)
        return
    if isinstance(node, ast.Call):
        if not _is_light(module, node):
            return
        if isinstance(node.func, ast.Attribute) and not module.called(node):
            _origins(module, node.func.value, depth, found)
        for given in (*node.args, *(k.value for k in node.keywords)):
            _origins(module, given, depth, found)
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr | ast.comprehension):
            _origins(module, child, depth, found)


def _is_light(module: Module, value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return called_last(value, module) in _LIGHT or is_collective(value, module)
    return isinstance(value, ast.Name | ast.Attribute | ast.BinOp | ast.Subscript | ast.UnaryOp | ast.IfExp)


def moved(module: Module, statement: ast.stmt) -> str | None:
    """The text of a statement without its indentation, to be put elsewhere; None when that would change it."""
    if any(isinstance(n, ast.Constant | ast.JoinedStr) and n.end_lineno != n.lineno for n in ast.walk(statement)):
        return None  # a string over several lines would lose spaces
    margin = statement.col_offset
    first, *rest = module.source(statement).splitlines()
    if any(line[:margin].strip() for line in rest):
        return None
    return "\n".join([first, *(line[margin:] for line in rest)])


def within_block(module: Module, node: ast.AST, block: list[ast.stmt]) -> ast.stmt | None:
    """The statement of this block that a node is, or is part of."""
    for one in (node, *module.parents(node)):
        if any(one is s for s in block):
            return one if isinstance(one, ast.stmt) else None
    return None


def stored_in(node: ast.AST) -> set[str]:
    """The names that a piece of the tree gives values to."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}


def read_in(node: ast.AST) -> set[str]:
    """The names that a piece of the tree reads."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}

"""What carries a gradient: which places record one, and which values are constant for it.

A hazard in sampling code, in a schedule made once from numbers, or inside an optimizer cannot put NaN into a gradient.
File names are no evidence, in either direction.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from .flow import has_argument
from .names import called_last, dotted, key_of, word_set
from .values import made_of, number

if TYPE_CHECKING:
    from .source import Module

Function = ast.FunctionDef | ast.AsyncFunctionDef

_NUMBERS = {"int", "float", "bool", "str", "Optional[int]", "Optional[float]", "torch.dtype", "torch.device"}
_WHOLE = word_set(
    """long int short bool byte argmax argmin argsort round floor ceil detach sign bincount nonzero count_nonzero
    eq ne gt lt ge le isnan isfinite isinf item tolist numpy size numel dim one_hot searchsorted bucketize
    unique isin logical_and logical_or logical_not stft_window no_grad"""
)
_MADE = word_set(
    """arange linspace logspace meshgrid ones zeros full eye ones_like zeros_like full_like tensor as_tensor
    from_numpy rand randn randint randperm rand_like randn_like empty hann_window hamming_window fftfreq
    rfftfreq tril triu IntTensor LongTensor new_zeros new_ones new_tensor new_full FloatTensor Tensor"""
)
_PLAIN_CALLS = {"len", "int", "float", "round", "range", "min", "max", "sum", "abs", "pow", "bool", "list", "tuple"}
_COUNTS = re.compile(
    r"(^|_)(lens?|lengths?|counts?|nums?|n|ids?|idx|index|indices|degrees?|deg|dims?|size|shape|steps?|epochs?|step|"
    r"timesteps?|alphas?|betas?|sigmas?|sigs?|snr|cumprod|alphas_cumprod|alpha_bar|noise_levels?|noise_scale|"
    r"temperature|lr|decay|rho|dtype|device|windows?|grid|coords?)(_|$|\d)",
    re.I,
)

# Coordinates, sizes, spectra and targets: nothing is learned before them. Weights are not zero, schedules are constant.
_GIVEN = re.compile(
    r"(^|_)(coords?|points?|dirs?|directions?|rays?|corners?|rois?|lwh|lengths?|lens|channels?|real_part|imag_part|wavs?\w*|audio|waveform|weights?|"
    r"kernel|gt|targets?|teacher\w*|labels?|true|priors?|alphas?|betas?|sigmas?|sigs?|gammas?|snr|cumprod|timesteps?|steps?|t|t\d|"
    r"tau|noise\w*|decay|rho|eta|a_?bar|at?|ab|beta\d|bias_correction\d?)(_|$|\d)",
    re.I,
)


def given_by_name(name: str) -> bool:
    """Whether a name says that nothing learned is behind it.

    >>> [given_by_name(n) for n in ("target_depth", "alphas_cumprod", "hidden", "pred")]
    [True, True, False, False]
    """
    return bool(_GIVEN.search(name))


def learned(node: ast.AST, module: Module) -> bool:
    """Whether a gradient can come to a value: a layer or parameter is behind it, or an argument that is not data."""
    loops = [p for p in module.parents(node) if isinstance(p, ast.For)]
    keys = {key_of(p) for p in ast.walk(node)} - {""} if loops else set()
    drawn = [p.iter for p in loops if keys & {key_of(t) for t in ast.walk(p.target)}]
    held = [part for e in (node, *drawn) for part in made_of(e, module, limit=200, indices=False)]
    for part in held:
        if isinstance(part, ast.Call) and module.operation(part) is None:
            func = part.func
            if key_of(func).startswith("self.") or called_last(part, module) == "Parameter":
                return True
        if isinstance(part, ast.Subscript) and key_of(part.value) == "self":
            return True  # a class that is a tensor
        key = key_of(part)
        scope = module.function(part)
        if isinstance(scope, ast.Module) or key in ("", "self", "cls") or not has_argument(scope, key):
            continue
        if not (
            given_by_name(key) or number_argument(scope, key) or _COUNTS.search(key) or key.startswith(("has_", "is_"))
        ):
            return True
    return False


def gradless(node: ast.AST, module: Module) -> bool:
    """Whether no gradient is recorded at a place: ``no_grad`` around it or around every caller, an optimizer, an
    ``autograd.Function``, whose own methods run without one."""
    return _gradless(node, module, frozenset())


def _gradless(node: ast.AST, module: Module, seen: frozenset[ast.AST]) -> bool:
    if module.under_no_grad(node) or _not_training(node, module):
        return True
    if any(_silent_class(p, module) for p in module.parents(node) if isinstance(p, ast.ClassDef)):
        return True
    if _of_arrays(node, module):
        return True
    for function in enclosing(node, module):
        if function in seen or len(seen) > 6:
            continue
        if evaluates(function, module):
            return True
        callers = callers_of(function, module)
        if callers and all(_gradless(c, module, seen | {function}) for c in callers):
            return True
    return False


def _of_arrays(node: ast.AST, module: Module) -> bool:
    """In a function that calls NumPy and nothing of torch: it works on arrays."""
    if "numpy" not in module.aliases.values():
        return False
    kept = vars(module)  # with the module, so that it goes when the module goes
    if "roots" not in kept:
        roots: dict[ast.AST, set[str]] = {}
        for call in module.nodes(ast.Call):
            roots.setdefault(module.function(call), set()).add(module.called(call).partition(".")[0])
        kept["roots"] = roots
    scope = module.function(node)
    found = kept["roots"].get(scope, set())
    return scope is not module.tree and "numpy" in found and "torch" not in found


def _not_training(node: ast.AST, module: Module) -> bool:
    """In a branch for evaluation: ``if not model.training:``, or the other one of ``if self.training:``."""
    below = node
    for outer in module.parents(node):
        if isinstance(outer, ast.If):
            negated = isinstance(outer.test, ast.UnaryOp) and isinstance(outer.test.op, ast.Not)
            asked = outer.test.operand if isinstance(outer.test, ast.UnaryOp) else outer.test
            if isinstance(asked, ast.Attribute) and asked.attr == "training":
                return negated == any(s is below for s in outer.body)
        below = outer
    return False


def enclosing(node: ast.AST, module: Module) -> list[Function]:
    """The functions around a place, innermost first."""
    return [p for p in module.parents(node) if isinstance(p, ast.FunctionDef | ast.AsyncFunctionDef)]


def callers_of(function: Function, module: Module) -> list[ast.Call]:
    """The calls of a function in its own file, those in itself left out."""
    if function.name.startswith("__") or function.name in ("forward", "step", "update", "backward"):
        return []  # called under another name, or the name is everybody's
    found = module.calls(function.name)
    return [c for c in found if all(p is not function for p in module.parents(c))]


def _silent_class(klass: ast.ClassDef, module: Module, depth: int = 0) -> bool:
    bases = [module.called(b) or dotted(b) for b in klass.bases]
    above = [
        k for k in module.nodes(ast.ClassDef) if isinstance(k, ast.ClassDef) and k.name in bases and k is not klass
    ]
    if depth < 4 and any(_silent_class(k, module, depth + 1) for k in above):
        return True
    return any(b in ("torch.autograd.Function", "autograd.Function", "Function") for b in bases) or any(
        b.rpartition(".")[2].endswith(("Optimizer", "LRScheduler", "_LRScheduler")) for b in bases
    )


def evaluates(function: Function, module: Module) -> bool:
    """Whether a function puts a model into eval mode and differentiates nothing."""
    calls = [c for c in module.calls("eval") if not c.args and any(p is function for p in module.parents(c))]
    if not calls:
        return False
    trains = module.calls("backward", "train", "grad", "manual_backward")
    return not any(p is function for c in trains for p in module.parents(c))


def constant(node: ast.AST, module: Module, depth: int = 0) -> bool:
    """Whether a value has no gradient: numbers, sizes, counts, buffers, schedules, and what is made of them alone."""
    if depth > 12:
        return False
    if isinstance(node, ast.Constant | ast.Compare | ast.JoinedStr):
        return True
    if number(node, module) is not None:
        return True
    if isinstance(node, ast.BinOp):
        return constant(node.left, module, depth + 1) and constant(node.right, module, depth + 1)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Invert | ast.Not) or constant(node.operand, module, depth + 1)
    if isinstance(node, ast.Tuple | ast.List):
        return all(constant(e, module, depth + 1) for e in node.elts)
    if isinstance(node, ast.IfExp):
        return constant(node.body, module, depth + 1) and constant(node.orelse, module, depth + 1)
    if isinstance(node, ast.Subscript):
        named = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
        return not named and constant(node.value, module, depth + 1)  # graph.data["h"] is no x.data
    if isinstance(node, ast.Call):
        return _constant_call(node, module, depth + 1)
    if key_of(node):
        return _constant_name(node, module, depth + 1)
    if isinstance(node, ast.Attribute):
        if node.attr in ("shape", "ndim", "dtype", "device", "data", "pi", "inf", "nan"):
            return True
        return bool(_COUNTS.search(node.attr)) or constant(node.value, module, depth + 1)
    return False


def _constant_call(call: ast.Call, module: Module, depth: int) -> bool:
    name, last = module.called(call), called_last(call, module)
    if last in _WHOLE or name.partition(".")[0] in ("math", "numpy", "random"):
        return True
    found = module.operation(call)
    if last in ("tensor", "as_tensor") and call.args and key_of(call.args[0]):
        return constant(call.args[0], module, depth)
    if last in _MADE and (name.startswith("torch.") or last.startswith("new_")):
        return last not in ("tril", "triu") or (
            found is not None and constant(found.operand or call.args[0], module, depth)
        )
    if name in _PLAIN_CALLS:
        return name in ("len", "int", "float", "range") or all(constant(a, module, depth) for a in call.args)
    inner = found.operand if found else call.func.value if isinstance(call.func, ast.Attribute) and not name else None
    if found and found.name in ("sum", "mean") and inner is not None and _is_mask(inner, module):
        return True
    if inner is None and not found:
        own = [f for f in module.nodes(ast.FunctionDef) if isinstance(call.func, ast.Name) and f.name == call.func.id]
        return bool(own) and all(constant(a, module, depth) for a in call.args) and bool(call.args)
    given = [inner, *(found.args if found else call.args)]
    return all(g is None or constant(g, module, depth) for g in given) and (found is not None or _same(last))


def _same(last: str) -> bool:
    from .values import SAME

    return last in SAME or last in ("copy", "unsqueeze", "cat", "stack")


def _is_mask(node: ast.expr, module: Module) -> bool:
    from .numerics import boolean
    from .values import core

    return boolean(node, module) or key_of(core(node, module)).rpartition(".")[2].endswith("mask")


def _constant_name(node: ast.AST, module: Module, depth: int) -> bool:
    key = key_of(node)
    last = key.rpartition(".")[2]
    klass = module.klass(node) if key.startswith("self.") else None
    if klass is not None and _buffered(klass, last, module):
        return True
    held = module.origins(node)
    if held:
        return all(constant(v, module, depth) for v in held)
    if key.startswith("self."):
        return klass is not None and _typed(klass, last)
    scope = module.function(node)
    if not isinstance(scope, ast.Module) and has_argument(scope, key):
        return number_argument(scope, key) or bool(_COUNTS.search(last)) or _given_constants(scope, key, module, depth)
    if _loop_number(node, module):
        return True
    return bool(_COUNTS.search(last)) and not module.flow.bindings(scope, key)


def _given_constants(scope: ast.AST, key: str, module: Module, depth: int) -> bool:
    """An argument for which every call in the file gives a constant: ``sinc(t)`` of a window, with t a linspace."""
    if not isinstance(scope, ast.FunctionDef):
        return False
    calls = callers_of(scope, module)
    if not calls or depth > 6 or module.klass(scope) is not None:
        return False
    place = [a.arg for a in scope.args.args].index(key) if key in [a.arg for a in scope.args.args] else -1
    given = [
        next((k.value for k in c.keywords if k.arg == key), c.args[place] if 0 <= place < len(c.args) else None)
        for c in calls
    ]
    return all(g is not None and constant(g, module, depth + 3) for g in given)


def number_argument(scope: ast.AST, key: str) -> bool:
    """An argument that is a plain number by its annotation or its default."""
    a = scope.args  # type: ignore[attr-defined]
    positional = [*a.posonlyargs, *a.args]
    defaults = dict(zip([p.arg for p in reversed(positional)], reversed(a.defaults), strict=False))
    defaults |= {k.arg: d for k, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None}
    noted = next((p.annotation for p in [*positional, *a.kwonlyargs] if p.arg == key), None)
    if noted is not None and ast.unparse(noted) in _NUMBERS:
        return True
    default = defaults.get(key)
    return isinstance(default, ast.Constant) and isinstance(default.value, int | float | str)


def _buffered(klass: ast.ClassDef, name: str, module: Module) -> bool:
    for call in module.calls("register_buffer"):
        first = call.args[0] if call.args else None
        if isinstance(first, ast.Constant) and first.value == name and any(p is klass for p in module.parents(call)):
            return True
    return False


def _typed(klass: ast.ClassDef, name: str) -> bool:
    """A field of a class that is annotated as a number."""
    return any(
        isinstance(s, ast.AnnAssign) and dotted(s.target) == name and ast.unparse(s.annotation) in _NUMBERS
        for s in klass.body
    )


def _loop_number(node: ast.AST, module: Module) -> bool:
    """A counter: ``for i in range(n)``, ``for i, x in enumerate(...)``."""
    for outer in module.parents(node):
        if isinstance(outer, ast.For | ast.comprehension) and isinstance(outer.iter, ast.Call):
            name = module.called(outer.iter)
            target = outer.target
            if name == "enumerate" and isinstance(target, ast.Tuple) and target.elts:
                target = target.elts[0]
            if name in ("range", "enumerate") and key_of(target) == key_of(node):
                return True
    return False

"""NP223: a parameter made of memory that nobody wrote."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..names import dotted, key_of, last_name
from ..rule import Change, Found, Rule
from ..training import keyword
from ..values import scalar

if TYPE_CHECKING:
    from ..source import Module

_EMPTY = {"torch.empty", "torch.empty_like", "torch.Tensor", "torch.FloatTensor", "torch.cuda.FloatTensor"}
_READS = {"linear", "matmul", "einsum", "bmm", "mm", "cat", "stack", "Parameter", "register_parameter", "append", "len"}


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    if module.called(node) not in ("torch.nn.Parameter", "torch.nn.parameter.Parameter") or module.is_test:
        return
    made = node.args[0] if node.args else keyword(node, "data")
    frozen = keyword(node, "requires_grad") or (node.args[1] if len(node.args) > 1 else None)
    if not isinstance(made, ast.Call) or not _empty(made, module) or frozen is not None:
        return
    owner = module.statement(node)
    targets = owner.targets if isinstance(owner, ast.Assign) else [getattr(owner, "target", None)]
    names = [key_of(t) for t in targets if t is not None and key_of(t).startswith("self.")]
    klass = module.klass(node)
    if not names or klass is None or getattr(owner, "value", None) is not node or _written(klass, names[0], module):
        return
    yield Found(
        node=node,
        message=f"{names[0]} is made of memory that nothing initializes: it starts with whatever lies there, "
        "NaN included",
        help="initialize it: torch.zeros(...), or torch.nn.init.normal_ on the parameter",
        edits=_fix(made, module),
        info=_loaded(klass, module),
    )


def _loaded(klass: ast.ClassDef, module: Module) -> bool:
    """Whether another file may write into it: by a loop over parameters, or from a checkpoint, as nothing trains."""
    if any(word in module.text for word in ("load_state_dict", "PreTrainedModel")):
        return True
    alone = module.trained_elsewhere(klass.name) is None
    return module.project.initializes or not (alone or module.project.optimizer)


def _empty(made: ast.Call, module: Module) -> bool:
    name = module.called(made)
    if name not in _EMPTY or any(isinstance(a, ast.Constant) and a.value == 0 for a in made.args):
        return False  # a size of 0 holds nothing
    if name in ("torch.empty", "torch.empty_like"):
        return keyword(made, "device") is None or "meta" not in module.source(made)
    sizes = [a for a in made.args if not isinstance(a, ast.List | ast.Tuple | ast.Starred | ast.Call)]
    one = len(made.args) == 1 and not scalar(made.args[0], module)  # torch.Tensor(values)
    return bool(sizes) and len(sizes) == len(made.args) and not one


def _written(klass: ast.ClassDef, key: str, module: Module) -> bool:
    """Whether anything may write into the parameter: an init function, an in-place method, a loop over all of them."""
    bases = [module.called(b) or dotted(b) for b in klass.bases]
    if not all(b.startswith("torch.nn.") or b in ("nn.Module", "Module") for b in bases):
        return True  # the class above may do it
    name = key.rpartition(".")[2]
    for part in _run(klass, module):
        if isinstance(part, ast.Call):
            last = last_name(part)
            if last in ("parameters", "named_parameters", "apply", "_reset_parameters", "post_init", "modules"):
                whose = part.func.value if isinstance(part.func, ast.Attribute) else None
                if whose is None or not key_of(whose).startswith(
                    "self."
                ):  # those of a part of it do not reach this one
                    return True
            given = [*part.args, *(k.value for k in part.keywords)]
            if any(key_of(n) == key for g in given for n in ast.walk(g)) and last not in _READS:
                return True
            on = part.func.value if isinstance(part.func, ast.Attribute) else None
            if on is not None and last.endswith("_") and any(key_of(n) == key for n in ast.walk(on)):
                return True
        if isinstance(part, ast.List | ast.Tuple) and isinstance(part.ctx, ast.Load) and key in map(key_of, part.elts):
            above = module.parent(part)
            if not (isinstance(above, ast.Call) and last_name(above) in _READS):
                return True  # several are initialized in a loop
        if isinstance(part, ast.Subscript | ast.Attribute) and isinstance(part.ctx, ast.Store):
            if key_of(part.value) == key or (isinstance(part, ast.Attribute) and part.attr == name + "_"):
                return True
            if isinstance(part.value, ast.Attribute) and key_of(part.value.value) == key:
                return True  # self.weight.data[0] = ...
    if sum(b.value is not None for b in module.flow.members(klass, key)) > 1:
        return True
    outside = [c for c in module.nodes(ast.Call) if last_name(c).endswith("_") or "init" in last_name(c)]
    return any(
        isinstance(n, ast.Attribute) and n.attr == name and key_of(n) != key for c in outside for n in ast.walk(c)
    )


def _run(klass: ast.ClassDef, module: Module) -> Iterator[ast.AST]:
    """All nodes of a class but those of a ``reset_parameters`` that nothing calls: nn.Module does not."""
    for part in klass.body:
        resets = isinstance(part, ast.FunctionDef) and part.name == "reset_parameters"
        if not resets or module.calls("reset_parameters"):
            yield from ast.walk(part)


def _fix(made: ast.Call, module: Module) -> tuple[Change, ...]:
    if module.called(made) == "torch.empty":
        name, needed = module.spell("torch.zeros")
        return (module.replace(made.func, name), *needed)
    return ()


RULE = Rule(
    code="NP223",
    name="parameter-never-initialized",
    what="""
Finds `nn.Parameter(torch.empty(...))` (also `torch.Tensor(n, m)`) in a class that never writes into it: no init
function, no in-place method, no loop over its parameters.
""",
    why="""
`torch.empty` gives memory as it is found. Often that is zeros, so it works on one machine and in one test; after other
tensors were freed it holds old values, 1e38, or NaN. Three real runs broke on their first step, only on some GPUs.
""",
    bad="""
class Scale(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(dim))

    def forward(self, x):
        return x * self.gamma
""",
    good="""
class Scale(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(dim))
        nn.init.ones_(self.gamma)

    def forward(self, x):
        return x * self.gamma
""",
    false_alarm="A checkpoint is always loaded over it. Frozen parameters and classes with other bases are left alone.",
    fix="unsafe",
    fix_note="`torch.empty` becomes `torch.zeros`, which is finite; whether zeros are a good start is yours to say.",
    default=False,
    nodes=(ast.Call,),
    calls=frozenset({"Parameter"}),
    words=("empty", "Tensor("),
    check=check,
)

"""In which precision the weights are that an optimizer or a Trainer is given, and what that trainer computes in.

>>> from .source import Module
>>> module = Module.parse('''
... import torch
... model = Net().cuda().half()
... teacher = Teacher().half().eval()
... optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
... ''')
>>> [(t.model, t.dtype, module.source(t.maker)) for t in trainings(module)]
[('model', 'float16', 'torch.optim.Adam(model.parameters(), lr=1e-4)')]
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .names import called_last, last_name, written
from .rule import Change
from .training import calls_in, is_true, keyword

if TYPE_CHECKING:
    from .source import Module, Scope

Half = Literal["float16", "bfloat16"]

ADAMS = {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop"}
_OPTIMIZERS = re.compile(
    r"^(Adam\w*|SGD|NAdam|RAdam|RMSprop|Adagrad|Lamb|LAMB|Lion|LBFGS|Adafactor|ASGD|Rprop|FusedAdam)$"
)
_TRAINER = re.compile(r"^\w*Trainer$")
_ARGUMENTS = re.compile(r"^\w*TrainingArguments$|^(SFT|DPO|ORPO|KTO|GRPO|Reward|PPO|CPO)Config$")
# Something else owns the weights' precision: adapters in fp32, quantized weights, apex or DeepSpeed master weights.
_OTHERWISE = re.compile(
    r"lora|peft|load_in_[48]bit|quantization_config|bnb_4bit|FP16_Optimizer|fp16_util|network_to_half|deepspeed|megatron|"
    r"fairscale|colossalai|convert_models_to_fp32|MasterParam|master_param|fp32_param|apex",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model in half precision whose weights are trained."""

    model: str
    dtype: Half
    cast: ast.Call
    """Where the weights got that precision."""
    maker: ast.Call
    """The optimizer or the Trainer that is given the model."""
    scope: Scope
    trainer: bool


def trainings(module: Module) -> list[Training]:
    """Every trained model of a file whose weights are in half precision."""
    if not any(word in module.text for word in ("optim", "Adam", "Trainer", "SGD")):
        return []
    found = list(_trainings(module))
    return found if found and not _OTHERWISE.search(module.text) else []


def _trainings(module: Module) -> Iterator[Training]:
    for call in module.nodes(ast.Call):
        name = called_last(call, module)
        if _OPTIMIZERS.match(name) and call.args:
            models, trainer = _parameters_of(module, call.args[0]), False
        elif _TRAINER.match(name):
            given = keyword(call, "model") or (call.args[0] if call.args else None)
            models, trainer = ([given] if given is not None else []), True
        else:
            continue
        for model in models:
            found = _cast(module, model, call)
            if found is not None:
                dtype, cast = found
                scope = module.function(call)
                yield Training(model=written(model), dtype=dtype, cast=cast, maker=call, scope=scope, trainer=trainer)


def _parameters_of(module: Module, node: ast.expr, depth: int = 2) -> list[ast.expr]:
    """The models whose parameters an expression is made of."""
    found = [
        c.func.value
        for c in calls_in(node)
        if last_name(c) in ("parameters", "named_parameters") and isinstance(c.func, ast.Attribute)
    ]
    if not found and depth and isinstance(node, ast.Name):
        for value in module.values(node):
            found += _parameters_of(module, value, depth - 1)
    return found


def _cast(module: Module, model: ast.expr, user: ast.Call) -> tuple[Half, ast.Call] | None:
    """Where a model was last given a half-precision dtype before it is used, unless something undid it."""
    name = written(model)
    if not name:
        return None
    scope = module.function(user)
    last: tuple[Half | None, ast.Call] | None = None
    for statement, value in _givings(module, name, scope):
        if _frozen(statement, name):
            return None
        if (statement.lineno, statement.col_offset) > (user.lineno, user.col_offset) and not name.startswith("self."):
            break
        if _apart(module, statement, user):
            continue
        for call in calls_in(value):
            dtype = _dtype_given(module, call)
            if dtype is not None and _concerns(call, name, value):
                last = (dtype if dtype != "float32" else None, call)  # type: ignore[assignment]
    return (last[0], last[1]) if last and last[0] else None


def _givings(module: Module, name: str, scope: Scope) -> Iterator[tuple[ast.stmt, ast.expr]]:
    """The statements that make or convert a model: assignments to its name, and calls of its methods."""
    owner = module.klass(scope) if name.startswith("self.") and not isinstance(scope, ast.Module) else None
    around: ast.AST = owner or scope
    for node in ast.walk(around):
        if isinstance(node, ast.Assign):
            mine = any(written(t) == name for t in node.targets)
        elif isinstance(node, ast.Expr):
            mine = isinstance(node.value, ast.Call) and _root_of(node.value) == name
        else:
            continue
        if mine and (owner is not None or module.function(node) is scope):
            yield node, node.value


def _root_of(call: ast.Call) -> str:
    """``model`` for ``model.cuda().half()``."""
    at: ast.expr = call
    while isinstance(at, ast.Call) and isinstance(at.func, ast.Attribute):
        at = at.func.value
    return written(at)


def _concerns(call: ast.Call, name: str, value: ast.expr) -> bool:
    """Whether a conversion is of the model itself: in the chain of calls that ends in it."""
    at: ast.expr = value
    while isinstance(at, ast.Call):
        if at is call:
            return True
        if isinstance(at.func, ast.Attribute):
            at = at.func.value
        elif at.args and last_name(at) in ("compile", "DataParallel", "DistributedDataParallel", "DDP"):
            at = at.args[0]
        else:
            return False
    return False


def _frozen(statement: ast.stmt, name: str) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or last_name(call) != "requires_grad_":
        return False
    return bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value is False


def _apart(module: Module, one: ast.AST, other: ast.AST) -> bool:
    """Whether two places are in different branches of the same `if`, or one in a branch that leaves."""
    above = {id(p): p for p in (other, *module.parents(other))}
    at: ast.AST = one
    for outer in module.parents(one):
        if isinstance(outer, ast.If) and isinstance(at, ast.stmt):
            block = module.block(at)
            if id(outer) in above:
                return not any(id(s) in above for s in block)
            if isinstance(block[-1], ast.Return | ast.Raise | ast.Continue):
                return True
        at = outer
    return False


def _dtype_given(module: Module, call: ast.Call) -> str | None:
    """The dtype that a call gives to a model: ``.half()``, ``.to(torch.float16)``, ``from_pretrained(dtype=…)``."""
    name = last_name(call)
    if name in ("half", "bfloat16", "float", "double") and not call.args and isinstance(call.func, ast.Attribute):
        return {"half": "float16", "bfloat16": "bfloat16"}.get(name, "float32")
    if name == "to":
        given = [*call.args, *(k.value for k in call.keywords if k.arg == "dtype")]
        return next((d for a in given if (d := dtype_of(module, a))), None)
    if name in ("from_pretrained", "from_config"):
        wanted = keyword(call, "torch_dtype", "dtype")
        return dtype_of(module, wanted) if wanted is not None else None
    return None


def dtype_of(module: Module, node: ast.AST) -> str | None:
    """ "float16", "bfloat16" or "float32" when an expression is that dtype, a name for it, or its text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value.removeprefix("torch.")
        return {"fp16": "float16", "bf16": "bfloat16"}.get(text, text if text in _DTYPES else None)
    name = module.called(node)
    if name.startswith("torch."):
        last = name.rpartition(".")[2]
        return _DTYPES.get(last)
    held = module.value(node) if isinstance(node, ast.Name | ast.Attribute) else None
    return dtype_of(module, held) if held is not None and not isinstance(held, ast.Name) else None


_DTYPES = {"float16": "float16", "half": "float16", "bfloat16": "bfloat16", "float32": "float32", "float": "float32"}


def trainer_precision(module: Module, training: Training) -> set[str]:
    """What the training computes in: "fp16" with a gradient scaler, "bf16", as far as the same function says."""
    found: set[str] = set()
    around = training.scope
    for call in calls_in(around):
        name = called_last(call, module)
        if _ARGUMENTS.match(name) and training.trainer:
            found |= {k for k in ("fp16", "bf16") if is_true(keyword(call, k))}
        elif name == "Accelerator":
            mode = keyword(call, "mixed_precision")
            if isinstance(mode, ast.Constant) and mode.value in ("fp16", "bf16"):
                found.add(str(mode.value))
        elif name == "GradScaler" and not is_disabled(call):
            found.add("fp16")
        elif name == "autocast" and not is_disabled(call) and not module.under_no_grad(call):
            given = [*call.args, *(k.value for k in call.keywords if k.arg == "dtype")]
            if any(dtype_of(module, a) == "bfloat16" for a in given):
                found.add("bf16")
    return found


def is_disabled(call: ast.Call) -> bool:
    enabled = keyword(call, "enabled")
    return isinstance(enabled, ast.Constant) and enabled.value is False


def keep_float32(module: Module, cast: ast.Call) -> tuple[Change, ...]:
    """The change after which the weights stay in float32, when it can be made at this place."""
    if last_name(cast) in ("half", "bfloat16") and isinstance(cast.func, ast.Attribute):
        model, statement = module.source(cast.func.value), module.statement(cast)
        target = statement.targets[0] if isinstance(statement, ast.Assign) else None
        again = target is not None and module.source(target) == model
        if again or (
            isinstance(statement, ast.Expr) and statement.value is cast and isinstance(cast.func.value, ast.Name)
        ):
            return (module.remove(statement),)
        return (module.replace(cast, model),)
    wanted = keyword(cast, "torch_dtype", "dtype")
    if wanted is not None and module.called(wanted).startswith("torch."):
        return (module.replace(wanted, module.source(wanted).rpartition(".")[0] + ".float32"),)
    return ()

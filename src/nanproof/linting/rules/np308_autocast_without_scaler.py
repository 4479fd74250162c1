"""NP308: autocast in float16, its default on CUDA, and no gradient scaler."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..names import called_last
from ..paths import ways_of
from ..rule import Change, Found, Rule, amp_loop
from ..source import Module
from ..training import in_tests, keyword, stored_in
from ..weights import dtype_of, is_disabled

_SCALED = re.compile(r"scaler|scale_loss|loss_scale|set_autocast|apex|deepspeed", re.IGNORECASE)
_EVAL = re.compile(r"valid|eval|test|infer|predict|sample|generate|encode")


def check(node: ast.With, module: Module) -> Iterator[Found]:
    call = next((c for item in node.items if (c := _autocast(module, item.context_expr))), None)
    if call is None or in_tests(module) or module.under_no_grad(node) or not _is_float16(module, call):
        return
    if not _trains(module, node) or _SCALED.search(module.text) or module.facts.trainer or module.project.scaler:
        return
    given = "float16" if keyword(call, "dtype") is not None else "float16 on CUDA, as no dtype is given"
    yield Found(
        node=node,
        message=f"`{module.source(call)}` computes in {given}; the loss is differentiated without a scaler",
        help="give dtype=torch.bfloat16, or scale the loss with torch.amp.GradScaler",
        edits=_fix(module, call),
    )


def _autocast(module: Module, node: ast.expr) -> ast.Call | None:
    """The call of autocast that a with-statement enters, by a name too."""
    if isinstance(node, ast.Call):
        return node if called_last(node, module) == "autocast" else None
    found = (_autocast(module, v) for v in module.values(node) if isinstance(v, ast.Call))
    return next((c for c in found if c is not None), None)


def _is_float16(module: Module, call: ast.Call) -> bool:
    name = module.called(call)
    if is_disabled(call) or name.startswith("torch.cpu."):
        return False
    device = call.args[0] if call.args else keyword(call, "device_type")
    if isinstance(device, ast.Constant) and device.value in ("cpu", "xla", "mps", "hpu", False):
        return False
    given = keyword(call, "dtype") or (call.args[1] if len(call.args) > 1 else None)
    if given is None:
        return (bool(name) and not call.keywords) or all(k.arg is not None for k in call.keywords)
    return dtype_of(module, given) == "float16"


def _trains(module: Module, block: ast.With) -> bool:
    """Whether a loss that is computed in this block is differentiated in the same function."""
    scope = module.function(block)
    if isinstance(scope, ast.FunctionDef) and _EVAL.search(scope.name.lower()):
        return False
    made = stored_in(block)
    for way in ways_of(module, scope):
        for event in way:
            if event.kind != "backward" or event.managed:
                continue
            inside = any(p is block for p in module.parents(event.place))
            if inside or (event.names & made and event.place.lineno > block.lineno):  # type: ignore[attr-defined]
                return True
    return False


def _fix(module: Module, call: ast.Call) -> tuple[Change, ...]:
    name, imports = module.spell("torch.bfloat16")
    given = keyword(call, "dtype")
    if given is not None:
        return (*imports, module.replace(given, name))
    inside = [*call.args, *(k.value for k in call.keywords)]
    if not inside:
        return (*imports, module.replace(call, f"{module.source(call.func)}(dtype={name})"))
    last = max(inside, key=lambda n: (n.lineno, n.col_offset))
    return (*imports, module.replace(last, f"{module.source(last)}, dtype={name}"))


RULE = Rule(
    code="NP308",
    name="autocast-without-scaler",
    what="Finds a training step under `autocast` without a dtype, or with float16, whose loss is differentiated by "
    "a plain `loss.backward()`, in a project without a GradScaler.",
    why='On CUDA autocast means float16 by default (`torch.get_autocast_dtype("cuda")` is '
    "torch.float16; on the CPU it is bfloat16). Gradients below 6e-8 are 0 in float16: a loss of 1e-8 · mean under "
    "float16 autocast gave weight gradients of exactly 0, with the scale of 65,536 they were 1.6e-4 (2.5e-9 after "
    "division). And nothing leaves out a step in which something passed 65,504. One post-mortem found its bf16 "
    "setting overridden by exactly this default.",
    bad=amp_loop("optimizer.step()", dtype=""),
    good=amp_loop("optimizer.step()", dtype=", dtype=torch.bfloat16"),
    miss="""import torch

def compute_loss(model, x, y):  # backward is in another file
    with torch.autocast("cuda"):
        return model(x, y)
""",
    false_alarm="The default was changed by `torch.set_autocast_dtype` in a file that is not linted together with "
    "this one, or the scaler is there.",
    fix="unsafe",
    fix_note="`dtype=torch.bfloat16` is given: the range of float32, 8 bits of precision, no scaler needed; it "
    "wants hardware that has it.",
    default=False,
    nodes=(ast.With,),
    words=("autocast",),
    check=check,
)

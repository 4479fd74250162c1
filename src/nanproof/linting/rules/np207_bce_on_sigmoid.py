"""NP207: binary cross-entropy on a sigmoid loses the gradient as soon as the sigmoid has rounded to 0 or 1."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..guards import guarded
from ..names import key_of
from ..numerics import probability
from ..rewrite import move
from ..rule import Change, Found, Moved, Rule
from ..values import trail

if TYPE_CHECKING:
    from ..names import Operation
    from ..source import Module

_LAYER = "torch.nn.BCELoss"


def check(node: ast.Call, module: Module) -> Iterator[Found]:
    made = _criterion(node, module)
    if made is None or module.is_test or module.under_no_grad(node):
        return
    given = next((k.value for k in node.keywords if k.arg == "input"), node.args[0] if node.args else None)
    source = probability(given, module) if given is not None else None
    if given is None or source is None or source.name != "sigmoid":
        return
    if any(key_of(t) and guarded(t, module) for t in trail(given, module)):
        return
    moved = _rewrite(node, given, source, made, module)
    yield Found(
        node=node,
        message="binary cross-entropy on a sigmoid: its gradient is exactly 0 once the sigmoid rounds to 0 or 1",
        help="pass the logits to binary_cross_entropy_with_logits (or nn.BCEWithLogitsLoss)",
        edits=moved.edits,
        safe=moved.safe,
    )


def _criterion(node: ast.Call, module: Module) -> ast.Call | None:
    """The call itself for ``F.binary_cross_entropy``; where the layer was made, for an ``nn.BCELoss``."""
    if module.called(node) == "torch.nn.functional.binary_cross_entropy":
        return node
    layer = node.func if isinstance(node.func, ast.Call) else module.value(node.func)
    return layer if isinstance(layer, ast.Call) and module.called(layer) == _LAYER else None


def _rewrite(node: ast.Call, given: ast.expr, source: Operation, made: ast.Call, module: Module) -> Moved:
    if source.operand is None:
        return Moved()
    needed: tuple[Change, ...]
    if made is node:
        name, needed = module.spell("torch.nn.functional.binary_cross_entropy_with_logits")
        renamed = module.replace(node.func, name)
    else:
        if not isinstance(node.func, ast.Call) and _called_elsewhere(node, module):
            return Moved()
        name, needed = module.spell("torch.nn.BCEWithLogitsLoss")
        renamed = module.replace(made.func, name)
    return move(given, given, [source.operand], module.source(source.operand), (renamed, *needed), module)


def _called_elsewhere(node: ast.Call, module: Module) -> bool:
    """Whether the same layer is used in another place too, which would get logits it did not ask for."""
    key = key_of(node.func)
    if isinstance(node.func, ast.Name):
        return len(module.uses(node.func, module.function(node))) != 1
    klass = module.klass(node)
    inside = ast.walk(klass) if klass else []
    return sum(key_of(n) == key and isinstance(n.ctx, ast.Load) for n in inside if isinstance(n, ast.Attribute)) != 1


RULE = Rule(
    code="NP207",
    name="bce-on-sigmoid",
    what="""
Finds `F.binary_cross_entropy` and `nn.BCELoss` on the output of a sigmoid.
""",
    why="""
In float32 `sigmoid(x)` is exactly 1 from x = 17 on and exactly 0 from x = -89 on. The loss has to take the logarithm
of 0 then; PyTorch puts -100 in its place. A logit of 17 for a negative example gets the loss 100 instead of 17, with a
gradient of 0 instead of 1: the most wrong predictions are those that learn nothing. In float16 it happens from x = 9
on, and under autocast `binary_cross_entropy` refuses to run.

With logits, sigmoid and logarithm are one formula, max(x, 0) - x·t + log(1 + exp(-|x|)), that neither overflows nor
loses its gradient.
""",
    bad="""
def edge_loss(logits, edges):
    return F.binary_cross_entropy(torch.sigmoid(logits), edges)
""",
    good="""
def edge_loss(logits, edges):
    return F.binary_cross_entropy_with_logits(logits, edges)
""",
    miss="""
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 1), nn.Sigmoid())

    def forward(self, x):
        return self.net(x)


def train_step(model, x, y):
    return nn.BCELoss()(model(x), y)  # the sigmoid is in another class
""",
    false_alarm="""
The probability is needed in the loss itself, as in a mixture of probabilities, and logits do not exist for it. A
probability that is clamped before is left alone.
""",
    fix="safe",
    fix_note="""
The loss and its gradient stay the same, to rounding, wherever the sigmoid has not saturated. When the probability
is used elsewhere too, the fix is marked unsafe; when an `nn.BCELoss` is called in several places, there is none.
""",
    nodes=(ast.Call,),
    words=("binary_cross_entropy", "BCELoss"),
    check=check,
)

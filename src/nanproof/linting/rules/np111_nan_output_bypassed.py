"""NP111: a layer that hands its input on when its output is NaN."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..flow import has_argument
from ..gradients import gradless
from ..nonfinite import NAN_WORDS, find_test, subject_of
from ..purpose import is_network
from ..reaction import arms
from ..rule import Found, Rule

if TYPE_CHECKING:
    from ..source import Module


def check(node: ast.If, module: Module) -> Iterator[Found]:
    klass, scope = module.klass(node), module.function(node)
    if klass is None or not is_network(klass, module) or module.is_test or gradless(node, module):
        return
    test = find_test(module, node.test)
    if test is None or not isinstance(scope, ast.FunctionDef) or subject_of(module, test) != "other":
        return
    tested = {n.id for o in test.operands for n in ast.walk(o) if isinstance(n, ast.Name)}
    for statement in arms(node, test)[0]:
        value = statement.value if isinstance(statement, ast.Return | ast.Assign) else None
        value = value.elts[0] if isinstance(value, ast.Tuple) and value.elts else value
        if isinstance(value, ast.Name) and value.id not in tested and has_argument(scope, value.id):
            yield Found(
                node=statement,
                message=f"the layer returns {value.id} when its output is NaN: the cause goes on unseen, "
                "and the layer stops learning",
                help="let it fail here (raise, or torch.autograd.set_detect_anomaly), and repair what makes the NaN",
            )


RULE = Rule(
    code="NP111",
    name="nan-output-bypassed",
    what="Finds a layer whose forward returns its own input when its output is NaN or infinite.",
    why="""
The loss looks finite while the layer is broken: it gets no gradient from such batches, its weights may already be NaN,
and then every batch goes round it. Training goes on with a smaller model than the one you think you have.
""",
    bad="""
class Block(nn.Module):
    def forward(self, x):
        y = x + self.mixer(self.norm(x))
        if torch.isnan(y).any():
            return x
        return y
""",
    good="""
class Block(nn.Module):
    def forward(self, x):
        y = x + self.mixer(self.norm(x))
        if not torch.isfinite(y).all():
            raise FloatingPointError("the mixer's output is not finite")
        return y
""",
    false_alarm="Inference code that must answer whatever happens. Under `torch.no_grad()` the rule is silent.",
    nodes=(ast.If,),
    words=NAN_WORDS,
    check=check,
)

"""NP204: a division by a standard deviation is 0 / 0 when all values are equal."""

from __future__ import annotations

import ast
import re

from ..flow import has_argument
from ..matching import Hit, asked, guarded, in_loss, quotient, replaced, reported, training
from ..names import called_last, written
from ..purpose import is_network
from ..rule import Rule
from ..values import core, cores, made_of, number, operation, trail

_REWARDS = re.compile(r"reward|(^|_)(adv|advantages?|returns?|scores?|r)(_|$)", re.I)
_RANDOM = {"randn", "rand", "randn_like", "rand_like"}


def _spread(hit: Hit) -> ast.expr | None:
    """What the standard deviation is of, if this is one: ``x.std()``, ``x.var().sqrt()``, ``x.var() ** 0.5``."""
    for at in cores(hit.operand, hit.module):
        found = operation(at, hit.module)
        if found is None or found.operand is None:
            continue
        if found.name == "std":
            return found.operand
        if found.name == "sqrt" or (found.name == "pow" and number(found.given(place=0), hit.module) == 0.5):
            inner = operation(core(found.operand, hit.module), hit.module)
            if inner is not None and inner.name == "var":
                return inner.operand
    return None


def _matters(hit: Hit) -> bool:
    """In training; and advantages of a policy that this class trains: their NaN reaches every weight."""
    module, klass = hit.module, hit.module.klass(hit.node)
    if training(hit):
        return True
    if klass is None or module.is_test or not re.search(r"(^|[._])(adv|advantages?)\w*$", module.source(hit.operand)):
        return False
    return not module.under_no_grad(hit.node)  # advantages are for training, whoever goes backward


def _plain_data(hit: Hit) -> bool:
    """Arrays, and numbers drawn at random: not equal by chance, or nothing that trains."""
    module = hit.module
    rewards = any(_REWARDS.search(key.rpartition(".")[2]) for key in hit.keys)  # trained on, arrays or not
    for part in made_of(hit.over or hit.operand, module, limit=200):
        if isinstance(part, ast.Call):
            if called_last(part, module) in _RANDOM:
                return True
            if module.called(part).partition(".")[0] in ("numpy", "pandas", "scipy") and not rewards:
                around = {called_last(p, module) for p in module.parents(part) if isinstance(p, ast.Call)}
                if not around & {"tensor", "as_tensor", "from_numpy", "FloatTensor", "Tensor"}:
                    return True
        elif re.search(r"(^|_)(data|dataset|feats?|features)$", getattr(part, "id", getattr(part, "attr", ""))):
            return True
    return False


def _spread_out(hit: Hit) -> bool:
    """Neither rewards, which are equal as soon as all fail, nor what a loss or a layer is given: it may be silence."""
    module = hit.module
    if in_loss(hit):
        return False
    names = {written(t).rpartition(".")[2] for t in trail(hit.operand, module)} - {""}
    if any(_REWARDS.search(n) for n in names):
        return False
    klass, scope = module.klass(hit.node), module.function(hit.node)
    return klass is None or not is_network(klass, module) or not any(has_argument(scope, n) for n in names)


RULE = Rule(
    code="NP204",
    name="divide-by-std",
    what="""
Finds a division by a standard deviation, `(x - x.mean()) / x.std()`, in training code, when nothing keeps it from zero:
of rewards and advantages, and of what a layer is given. Of anything else it is an info.
""",
    why="""
Equal values have the standard deviation 0 and differ from their mean by 0: the result is 0 / 0, NaN, in the value and
in the gradient. Rewards of a group are equal as soon as the model solves, or fails, all of it; activations are equal
when a channel has died; a constant image or a padded sequence is equal everywhere.

An eps in the divisor makes it 0. What an eps does not fix is a single element: the unbiased standard deviation of one
value is 0 / 0 itself, and `(x - x.mean()) / (x.std() + 1e-6)` stays NaN. Use `unbiased=False` where that can happen. In
float16 an eps below 6e-8 is 0.
""",
    bad="""
def policy_loss(log_probs, rewards):
    advantages = (rewards - rewards.mean()) / rewards.std()
    return -(log_probs * advantages).mean()
""",
    good="""
def policy_loss(log_probs, rewards):
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    return -(log_probs * advantages).mean()
""",
    miss="""
def policy_loss(log_probs, rewards):
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)  # NaN for a single reward
    return -(log_probs * advantages).mean()
""",
    false_alarm="""
The values cannot be equal, because they contain noise or come from a large data set. Statistics of a data set, NumPy
arrays and random numbers are left alone.
""",
    fix="unsafe",
    fix_note="It adds `1e-6`, which changes results in the seventh digit when the deviation is near 1.",
    words=("std", "var"),
    match=quotient().of(_spread),
    where=_matters,
    unless=(reported, guarded, asked, _plain_data),
    doubt=(_spread_out,),
    message=lambda h: f"a division by the deviation of {h.said('this')} is NaN when its values are equal",
    help="add an eps to the standard deviation: / (x.std() + 1e-6)",
    edit=replaced("{x} + 1e-6", ast.Call, ast.Name, ast.Attribute, ast.Subscript),
    about=lambda h: core(h.outer, h.module),
)

"""NP601: a sample is scaled by its own range, which is zero when it is constant."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..gradients import enclosing
from ..guards import changed_in_place
from ..names import last_name
from ..purpose import only_logged, trains
from ..rule import Found, Rule
from ..source import Module
from ..training import calls_in, in_tests, keyword, read_in

_SHOWN = re.compile(
    r"vis|plot|show|draw|heat|cam|colou?r|render|save|grid|overlay|figure|display|demo|export|write|tensor2im|to_im|"
    r"main|video|metric|eval|test_|score|analy|saliency|attribution|explain|postprocess|pipeline",
    re.IGNORECASE,
)
_SAMPLE = re.compile(
    r"getitem|forward|__call__|transform|preproc|normali[sz]|collate|load|augment|scale|prepare|minmax"
)
_END = re.compile(r"max|min\b|\.min|std|ptp|unique|any\(|range|diff|denom")
_END_NAMES = {"lo", "hi", "low", "high", "mn", "mx", "vmin", "vmax", "minimum", "maximum"}


def check(node: ast.BinOp, module: Module) -> Iterator[Found]:
    if not isinstance(node.op, ast.Div) or isinstance(node.right, ast.Constant | ast.Call | ast.Attribute):
        return
    if in_tests(module) or not module.uses_torch:
        return
    range_ = _resolved(module, node.right)
    if not isinstance(range_, ast.BinOp) or not isinstance(range_.op, ast.Sub):
        return
    high, low = _extreme(module, range_.left, "max"), _extreme(module, range_.right, "min")
    if high is None or low is None or ast.dump(high) != ast.dump(low):
        return
    above = _resolved(module, node.left)
    if isinstance(above, ast.BinOp) and isinstance(above.op, ast.Mult):
        above = above.right if isinstance(above.left, ast.Constant) else above.left
    if not isinstance(above, ast.BinOp) or not isinstance(above.op, ast.Sub):
        return
    if not _same_low(module, above.right, range_.right):
        return
    if not _per_sample(module, node, range_) or _guarded(module, node, range_) or _made_of_range(module, low):
        return
    if module.under_no_grad(node) and only_logged(node, module):
        return  # a picture for the log
    what = module.source(low)
    yield Found(
        node=node,
        message=f"`{what}` is divided by its own range, which is 0 when all its values are equal: 0/0 = NaN",
        help="add an eps to the range, or leave a constant sample at 0",
        info=trains(node, module) and not _of_rows(module, range_),  # a whole batch is hardly ever constant
        edits=(module.replace(node.right, f"{module.source(node.right)} + 1e-8"),) if node.right is range_ else (),
    )


def _resolved(module: Module, node: ast.expr) -> ast.expr:
    held = module.value(node) if isinstance(node, ast.Name) else None
    return held if held is not None else node


def _extreme(module: Module, node: ast.expr, which: str) -> ast.expr | None:
    """``x`` of ``x.max()``, ``np.max(x)``, ``x.max(dim=1)[0]``, ``torch.amax(x, 1)``, or of a name for that."""
    node = _resolved(module, node)
    while isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "values"):
        node = node.value
    if not isinstance(node, ast.Call):
        return None
    if last_name(node) in ("float", "item", "view", "unsqueeze", "reshape", "to") and isinstance(
        node.func, ast.Attribute
    ):
        return _extreme(module, node.func.value, which)
    if last_name(node).removeprefix("nan") not in (which, f"a{which}"):
        return None
    if module.called(node).partition(".")[0] in ("numpy", "torch"):
        return node.args[0] if node.args else None
    return node.func.value if isinstance(node.func, ast.Attribute) else None


def _same_low(module: Module, one: ast.expr, other: ast.expr) -> bool:
    return ast.dump(one) == ast.dump(other) or ast.dump(_resolved(module, one)) == ast.dump(_resolved(module, other))


def _per_sample(module: Module, node: ast.AST, range_: ast.BinOp) -> bool:
    """Whether a constant sample can come: one item at a time, or one range per row or feature."""
    scope = module.function(node)
    if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    klass = module.klass(scope)
    if any(_SHOWN.search(f.name) for f in enclosing(node, module)) or (klass is not None and _SHOWN.search(klass.name)):
        return False
    text = module.source(scope)
    if "255" in text or "imshow" in text or "uint8" in text:
        return False  # on its way to a picture
    if _of_rows(module, range_):
        return True
    if klass is not None:
        return bool(_SAMPLE.search(scope.name))
    return any(_prepares(module, c) for c in module.calls(scope.name))


def _of_rows(module: Module, range_: ast.BinOp) -> bool:
    ends = [_resolved(module, range_.left), _resolved(module, range_.right)]
    calls = [c for end in ends for c in calls_in(end)]
    given = {len(c.args) - (module.called(c) != "") for c in calls if last_name(c) in ("amin", "amax", "max", "min")}
    return any(keyword(c, "dim", "axis") is not None for c in calls) or bool(given - {0})


def _prepares(module: Module, call: ast.Call) -> bool:
    """Whether a function is used where one sample is prepared."""
    user = module.function(call)
    named = isinstance(user, ast.FunctionDef) and _SAMPLE.search(user.name)
    return bool(named) and module.klass(call) is not None


def _guarded(module: Module, node: ast.BinOp, range_: ast.expr) -> bool:
    """Whether a condition in the function looks at the range or its ends."""
    names = {n.id for part in (node.right, range_) for n in ast.walk(part) if isinstance(n, ast.Name)}
    ends = {n for n in names if n not in read_in(node.left) or n in _END_NAMES}
    if isinstance(node.right, ast.Name) and changed_in_place(node.right, module):
        return True
    scope = module.function(node)
    for test in ast.walk(scope):
        condition = test.test if isinstance(test, ast.If | ast.IfExp | ast.Assert | ast.While) else None
        if condition is not None and (ends & read_in(condition) or _END.search(module.source(condition))):
            return True
        if isinstance(test, ast.Call) and last_name(test) in ("where", "nan_to_num", "isnan", "isfinite", "errstate"):
            return True
        if isinstance(test, ast.Call) and keyword(test, "where") is not None:
            return True
    return False


def _made_of_range(module: Module, operand: ast.expr) -> bool:
    """A grid or a schedule is never constant."""
    held = module.value(operand) if isinstance(operand, ast.Name) else operand
    return isinstance(held, ast.Call) and last_name(held) in (
        "arange",
        "linspace",
        "range",
        "randn",
        "rand",
        "logspace",
    )


RULE = Rule(
    code="NP601",
    name="min-max-divide",
    what="Finds `(x - x.min()) / (x.max() - x.min())` without an eps or a test, in code that prepares one sample "
    "at a time (a Dataset, a transform, a forward) or takes the range of each row or feature.",
    why="A constant sample (an empty scan, a silent clip, a padded row) has range 0: `x = torch.full((3,), 2.0)` "
    "becomes [nan, nan, nan], and NumPy does the same with a warning that no one reads. One such sample makes the "
    "loss of its batch NaN, at whatever step the shuffle brings it.",
    bad="""import torch

class Scans(torch.utils.data.Dataset):
    def __getitem__(self, index):
        x = self.load(index)
        return (x - x.min()) / (x.max() - x.min())
""",
    good="""import torch

class Scans(torch.utils.data.Dataset):
    def __getitem__(self, index):
        x = self.load(index)
        return (x - x.min()) / (x.max() - x.min() + 1e-8)
""",
    miss="""def rescale(x, low, high):  # the caller takes them from x
    return (x - low) / (high - low)
""",
    false_alarm="Every sample is known to vary. Pictures for people (`visualize`, `plot`, `heatmap`, `* 255`) are "
    "not reported.",
    fix="unsafe",
    fix_note="1e-8 is added to the range, which changes results in the last digits, and constant samples from NaN "
    "to 0.",
    default=False,
    nodes=(ast.BinOp,),
    words=("min(",),
    check=check,
)

"""What the code does that matters to a cause, beyond what lint reports: each sign with its file and line.

>>> found = read_signs("model = Net().half()\\nnet = torch.compile(net)", "train.py")
>>> [(f.name, f.where) for f in found]
[('compiled', 'train.py:2'), ('half-weights', 'train.py:1')]
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..evidence import Fact
from .in_force import constant, dotted

_RAW = ("torch.Tensor", "torch.FloatTensor", "torch.empty", "torch.HalfTensor", "Tensor", "FloatTensor")
_SAFE = re.compile(
    r"eps|clamp|clip\(|maximum|nan_to_num|\+ ?1e-|\+ ?[A-Z_]*EPS|1e-\d|finfo|softplus|sigmoid|log_softmax|logsumexp|"
    r"math\.|np\.sqrt\(d|\bd_k|head_dim|\bdim\b(?!=)|abs\(\)? ?\+"
)
_COUNTS = (
    r"avg_factor|normali[sz]er|n_(?:pos|valid)"
    r"|num_(?:\w+_)?(?:pos|positives?|valid|boxes|gts?|fg|objs?|objects|instances|targets|tokens|items)(?:_in_\w+)?"
)
_COUNT = re.compile(
    rf"{_COUNTS}|"
    r"\.sum\(\)|\.sum\(|len\(|\.numel\(\)|\.count_nonzero|\.shape\[0\]"
)


_LEARNED_SCALE = re.compile(r"exp\(-(?:\d\.?\d* \* )?(?P<scale>[\w.]+)\) \* .*\+ (?:\d\.?\d* \* )?(?P=scale)\b")
"""A loss that is weighted by a learned uncertainty: exp(-s) * loss + s."""


@dataclass(slots=True)
class _Seen:
    """What one pass over a file collects before it is judged as a whole."""

    parameters: dict[str, int] = field(default_factory=dict)
    initialized: set[str] = field(default_factory=set)
    initializes_all: bool = False
    half: int = 0
    to_float: bool = False
    optimizer_loaded: int = 0
    scheduler_made: int = 0
    last_epoch_given: bool = False
    last_epoch_set: int = 0


def read_signs(text: str, name: str) -> list[Fact]:
    """The signs in one file; none in a file that cannot be parsed."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return list(signs_of(tree, text, name))


def signs_of(tree: ast.AST, text: str, name: str) -> Iterator[Fact]:
    seen = _Seen()
    found = list(_each(tree, seen, name))
    done = seen.initialized - _never_run(tree, text)
    raw = {n: line for n, line in seen.parameters.items() if n not in done} if not seen.initializes_all else {}
    # an operation on a parameter that was never initialized is not where it began
    yield from (f for f in found if f.name != "pole-in-code" or not any(f"self.{n}" in f.words for n in raw))
    if raw:
        line = min(raw.values())
        words = f"{', '.join(sorted(raw)[:3])}: nn.Parameter over uninitialized memory, never initialized"
        yield Fact(name="raw-parameters", where=f"{name}:{line}", words=words)
    yield from _left_out(tree, name)
    yield from _guarded(tree, name)
    yield from _bypasses(tree, text, name)
    yield from _of_file(text, seen, name)


def _bypasses(tree: ast.AST, text: str, name: str) -> Iterator[Fact]:
    """A loss computed by the module inside of DDP, whose hooks then never fire."""
    if not re.search(r"DistributedDataParallel|\bDDP\(", text) or ".backward(" not in text:
        return
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    unwraps = "|".join(f.name for f in functions if re.search(r"return [\w.]+\.module\b", ast.unparse(f))) or "-"
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and "loss" in ast.unparse(node.targets[0]):
            called = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
            if re.search(rf"\.module(?:\.\w+)?$|\b(?:{unwraps})\(\)\.\w+$", called):
                words = f"`{ast.unparse(node)[:80]}` does not go through DDP: gradients are not synchronized"
                yield _fact("bypasses-ddp", name, node, words)
                return


def _left_out(tree: ast.AST, name: str) -> Iterator[Fact]:
    """Parameters of a class that the method which initializes all its weights does not mention."""
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef):
            continue
        methods = {m.name: ast.unparse(m) for m in owner.body if isinstance(m, ast.FunctionDef)}
        fills = next(
            (text for n, text in methods.items() if re.fullmatch(r"_?(?:init_weights|reset_parameters)", n)), ""
        )
        made = re.findall(r"self\.(\w+) = (?:torch\.)?nn\.Parameter\(", methods.get("__init__", ""))
        missed = [p for p in made if fills and f"self.{p}" not in fills]
        if missed:
            words = f"{', '.join(missed[:3])}: not initialized by the method that initializes the others"
            yield _fact("left-out-of-init", name, owner, words)


def _each(tree: ast.AST, seen: _Seen, name: str) -> Iterator[Fact]:
    """The signs of single nodes; what counts for the file as a whole goes into ``seen``."""
    checked = list(_checks(tree))
    constants, norms = dict(_constants(tree)), frozenset(_norms(tree))
    yield from _filtered_means(tree, checked, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _call(node, seen, name)
        elif isinstance(node, ast.Attribute) and dotted(node) == "torch.compile":
            yield _fact("compiled", name, node, "torch.compile")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            yield from (f for f in _division(node, norms, name) if not _is_checked(node.right, checked))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            if (learned := _LEARNED_SCALE.search(shown := ast.unparse(node))) is not None and "clamp" not in shown:
                words = f"`{shown[:90]}`: exp(-{learned['scale']}) of a learned scale grows without bound"
                yield _fact("pole-in-code", name, node, words)
            small = constant(node.right)
            small = constants.get(node.right.id) if isinstance(node.right, ast.Name) else small
            if isinstance(small, float) and 0 < small < 6e-8:
                yield _fact("tiny-eps", name, node, f"`{ast.unparse(node)[-60:]}`: {small:g} is 0 in fp16")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and constant(node.left) in (1, 1.0):
            small = constant(node.right)
            if isinstance(small, float) and 0 < small < 2**-11:
                yield _fact("tiny-eps-at-one", name, node, f"`{ast.unparse(node)}` is 1 in fp16 and bf16")
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.value, ast.Name):
            small = constants.get(node.value.id, 1.0)
            if 0 < small < 6e-8:
                yield _fact("tiny-eps", name, node, f"`{ast.unparse(node)}`: {small:g} is 0 in fp16")
        elif isinstance(node, ast.Assign):
            yield from _assignment(node, seen, name)
        elif isinstance(node, ast.For) and "parameters()" in ast.unparse(node.iter):
            seen.initializes_all |= "init" in ast.unparse(node) or "uniform_" in ast.unparse(node)


def _guarded(tree: ast.AST, name: str) -> Iterator[Fact]:
    """``torch.where`` over a result that was computed before, where its operation has no gradient."""
    risky = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found = re.match(r"(?:torch|th)\.(?:sqrt|log|log2|acos|asin|atanh|rsqrt|pow)\(", ast.unparse(node.value))
            if found and not _SAFE.search(ast.unparse(node.value)):
                risky[node.targets[0].id] = ast.unparse(node.value)[:60]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in ("torch.where", "th.where") and len(node.args) == 3:
            hidden = next((a.id for a in node.args[1:] if isinstance(a, ast.Name) and a.id in risky), "")
            if hidden:
                words = f"`{ast.unparse(node)[:80]}` selects after `{risky[hidden]}`: the gradient of that is NaN still"
                yield _fact("selects-after", name, node, words)


def _constants(tree: ast.AST) -> Iterator[tuple[str, float]]:
    """Small numbers that have a name, such as EPS."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = constant(node.value)
            if isinstance(value, float):
                yield node.targets[0].id, value


def _norms(tree: ast.AST) -> Iterator[str]:
    """Names that hold a bare norm, which may be 0."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            made = ast.unparse(node.value)
            if re.search(r"(?<!np\.linalg)(?<!numpy\.linalg)\.norm\(", made) and not _SAFE.search(made):
                yield node.targets[0].id


def _of_file(text: str, seen: _Seen, name: str) -> Iterator[Fact]:
    lower = text.lower()
    if seen.half and not seen.to_float:
        yield Fact(name="half-weights", where=f"{name}:{seen.half}", words="the model's weights are cast to fp16")
    if seen.scheduler_made > seen.optimizer_loaded > 0 and not seen.last_epoch_given:
        words = "the scheduler is built after optimizer.load_state_dict, without last_epoch"
        yield Fact(name="scheduler-rebuilt", where=f"{name}:{seen.scheduler_made}", words=words)
    elif seen.last_epoch_set:
        words = "scheduler.last_epoch is set by hand; the rate of the next step does not follow"
        yield Fact(name="scheduler-rebuilt", where=f"{name}:{seen.last_epoch_set}", words=words)
    if (ctc := re.search(r"\bctc_?(?:\w+_)?loss\b", lower)) is not None:
        where = f"{name}:{lower.count(chr(10), 0, ctc.start()) + 1}"
        if not re.search(r"zero_infinity\s*=\s*true", lower):
            yield Fact(name="ctc-unguarded", where=where, words="CTC loss without zero_infinity=True")
    if re.search("softmax|attn|attention", lower) and (masking := next(_infinite_masks(text), None)) is not None:
        line, shown = masking
        words = f"`{shown}` before a softmax: a row of it that is masked whole is 0/0"
        yield Fact(name="masks-with-infinity", where=f"{name}:{line}", words=words)
    if re.search(r"-100\b|(?i:ignore_?(?:index|label)?)\b", text) and (cut := _CUT_LABELS.search(text)) is not None:
        words = f"`{cut[0].strip()}`: what is left of the labels may be all ignored"
        yield Fact(name="labels-truncated", where=f"{name}:{text.count(chr(10), 0, cut.start()) + 1}", words=words)
    masked = (i for i, row in enumerate(text.splitlines(), 1) if "key_padding_mask" in row)
    if line := next(masked, 0):
        yield Fact(name="masks-attention", where=f"{name}:{line}", words="a padding mask goes into attention")


_CUT_LABELS = re.compile(
    r"\b(?:labels?|targets?) = (?:\S*labels?\S*|\(.*(?:-100|(?i:ignore)\w*).*\))\[\s*:\s*[A-Za-z_][\w.]*\]"
)
_FILLS = re.compile(
    r"(?:(?:masked_fill_?|where|fill_|new_full|torch\.full)\(.{0,200}?|\w\[.{1,80}\]\s*=\s*)"
    r"(?:-\s*(?:float\(['\"]inf(?:inity)?['\"]\)|(?:torch|math|np)\.inf|inf\b)|['\"]-inf(?:inity)?['\"]|float\(['\"]-inf)"
)
_CHOICE = re.compile(r"(?i)pad|length|\blens?\b|keep|valid|visible|neighbo|\badj|(?:attention|key|src|mem|input)_mask")


_INFINITE = r"-?\s*(?:float\(['\"]-?inf(?:inity)?['\"]\)|(?:torch|math|np)\.inf)"
_GIVEN = re.compile(r"def \w+\([^)]*\b(?P<mask>\w*mask)\b(?s:.*)(?:masked_fill_?|where)\([^)]*\b(?P=mask)\b")


def _infinite_masks(text: str) -> Iterator[tuple[int, str]]:
    """Lines that fill scores with -inf where something is absent; a causal mask alone leaves each row its diagonal.

    A mask that comes in as an argument may be any.
    """
    rows = text.splitlines()
    names = "|".join(re.findall(rf"(?m)^\s*(\w+)\s*=\s*{_INFINITE}\s*$", text))
    by_name = re.compile(rf"(?:masked_fill_?|where)\(.*\b(?:{names})\b") if names else None
    for i, row in enumerate(rows):
        above = "\n".join(rows[max(0, i - 12) : i + 1])
        fills = _FILLS.search(row) or (by_name is not None and by_name.search(row))
        causal = re.search(r"tri[ul]|\[:,\s*\w+:\]|causal", "\n".join(rows[max(0, i - 2) : i + 3]))
        if fills and not causal and (_CHOICE.search(above) or _GIVEN.search(above)):
            yield i + 1, row.strip()[:80]


def _fact(flag: str, name: str, node: ast.AST, words: str) -> Fact:
    return Fact(name=flag, where=f"{name}:{getattr(node, 'lineno', 1)}", words=words)


def _never_run(tree: ast.AST, text: str) -> set[str]:
    """Attributes that are initialized only in methods that nothing in the file calls."""
    inside: dict[str, set[bool]] = {}
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.FunctionDef):
            continue
        called = owner.name == "__init__" or re.search(rf"(?<!def )\b{re.escape(owner.name)}\(", text) is not None
        for node in ast.walk(owner):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("_"):
                for name in re.findall(r"self\.(\w+)", ast.unparse(node)):
                    inside.setdefault(name, set()).add(called or not re.search(r"reset|init", owner.name))
    return {name for name, calls in inside.items() if not any(calls)}


def _call(node: ast.Call, seen: _Seen, name: str) -> Iterator[Fact]:
    full = dotted(node.func)
    callee = full.rpartition(".")[2] or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
    shown = ast.unparse(node)[:90]
    keywords = {k.arg: k.value for k in node.keywords if k.arg}
    if callee.endswith("_") and callee not in ("clip_grad_norm_", "masked_fill_", "zero_grad_"):
        for argument in (*node.args[:1], node.func):
            for found in re.findall(r"self\.(\w+)", ast.unparse(argument)):
                seen.initialized.add(found)
    if callee == "half" and not node.args:
        base = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        if re.search(r"(?i)model|net|module|encoder|decoder|cuda\(\)|\w+\(.*\)", base) and not re.search(
            r"^(x|img|image|inp)", base
        ):
            seen.half = node.lineno
    if callee == "float" and not node.args and isinstance(node.func, ast.Attribute):
        seen.to_float |= re.search(r"(?i)model|net|module", ast.unparse(node.func.value)) is not None
    averages = callee in ("CrossEntropyLoss", "NLLLoss", "cross_entropy", "nll_loss") and "ignore_index" in keywords
    if averages and constant(keywords.get("reduction", ast.Constant("mean"))) == "mean":
        yield _fact("ignores-labels", name, node, f"`{shown}` is 0 / 0 for a batch whose labels are all ignored")
    if full == "clip.load":
        words = "clip.load gives fp16 weights on a GPU"
        yield _fact("half-weights", name, node, words)
    if callee == "load_state_dict" and re.search(r"(?i)optim", full):
        seen.optimizer_loaded = node.lineno
    if re.search(r"LR$|Scheduler$|get_\w*schedule", callee) and callee not in ("LR",):
        seen.scheduler_made = max(seen.scheduler_made, node.lineno)
        seen.last_epoch_given |= "last_epoch" in keywords
    if callee in ("sqrt", "log", "acos", "asin", "arccos", "norm", "log2", "atanh", "rsqrt", "pow"):
        yield from _pole(node, callee, full, shown, name)
    if (
        callee == "exp"
        and re.search(r"log_?(var|std|sigma|scale)|log_?p\w* - \w*log_?p", shown)
        and not re.search(r"clamp|clip|0\.5|tanh", shown)
    ):
        yield _fact("pole-in-code", name, node, f"`{shown}` grows without bound")
    if callee in ("device", "to") and node.args and constant(node.args[0]) == "mps":
        yield Fact(name="gpu", value="apple", where=f"{name}:{node.lineno}", words="device mps")
    if callee == "DataCollatorForCompletionOnlyLM":
        yield _fact("response-template", name, node, "labels depend on finding a response template in each sample")
    given = keywords.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
    if callee == "scaled_dot_product_attention" and given is not None and not isinstance(given, ast.Constant):
        yield _fact("masks-attention", name, node, f"attn_mask={ast.unparse(given)[:40]} goes into attention")
    part = next((k for k in ("assistant_only_loss", "completion_only_loss") if constant(keywords.get(k)) is True), "")
    if part:
        longest = constant(keywords.get("max_length") or keywords.get("max_seq_length"))
        cut = f" and max_length={longest}: truncation may leave no label" if isinstance(longest, int) else ""
        yield _fact("labels-truncated" if cut else "response-template", name, node, f"{part}=True{cut}")
    if callee in ("std", "var") and not full.startswith(("np.", "numpy.")) and _over_batch(node, keywords):
        words = f"`{shown}` is NaN for a batch of one sample, such as the last of an epoch"
        yield _fact("std-of-batch", name, node, words)


def _over_batch(node: ast.Call, keywords: Mapping[str, ast.expr]) -> bool:
    """Whether an unbiased deviation is taken over the first axis."""
    place = 1 if dotted(node.func).startswith(("torch.", "th.")) else 0
    axis = keywords.get("dim", keywords.get("axis", node.args[place] if len(node.args) > place else None))
    biased = any(k in keywords for k in ("unbiased", "correction"))
    return axis is not None and constant(axis) == 0 and not isinstance(constant(axis), bool) and not biased


def _pole(node: ast.Call, callee: str, full: str, shown: str, name: str) -> Iterator[Fact]:
    """log, sqrt, acos of something that may reach the edge of their domain."""
    argument = node.args[0] if node.args and full.startswith(("torch.", "th.", "F.")) else None
    if argument is None and isinstance(node.func, ast.Attribute) and not full.startswith(("np.", "math.", "numpy.")):
        argument = node.func.value
    if argument is None or isinstance(argument, ast.Constant):
        return
    text = ast.unparse(argument)
    if callee == "pow":
        power = constant(node.args[-1]) if node.args else None
        if not isinstance(power, float) or not 0 < power < 1:
            return
    if callee == "norm" or (callee in ("log", "log2") and re.search(r"log_softmax|\+ ?1\b", text)):
        return
    if callee == "sqrt" and re.search(r"clamp\((min=)?0|clamp_?\(0|relu", text):
        yield _fact("pole-in-code", name, node, f"`{shown}`: the gradient of sqrt is infinite at 0, clamped or not")
    elif not _SAFE.search(text):
        yield _fact("pole-in-code", name, node, f"`{shown}` has no finite value or gradient at the edge of its domain")


@dataclass(frozen=True, slots=True)
class _Checked:
    """What the conditions in one function look at: where a count is compared, a zero of it is thought of."""

    first: int
    last: int
    names: frozenset[str]


def _checks(tree: ast.AST) -> Iterator[_Checked]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            tests = [n.test for n in ast.walk(function) if isinstance(n, ast.If | ast.IfExp | ast.Assert)]
            names = frozenset(name for test in tests if not _asks_for_none(test) for name in _parts(test))
            yield _Checked(getattr(function, "lineno", 0), getattr(function, "end_lineno", None) or 1 << 30, names)


def _asks_for_none(test: ast.expr) -> bool:
    """``x is not None`` says nothing about a zero."""
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot)


def _parts(node: ast.AST) -> Iterator[str]:
    """The names and calls that an expression is made of, as they are written."""
    yield from (ast.unparse(n) for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute | ast.Call))


def _is_checked(divisor: ast.expr, checked: list[_Checked]) -> bool:
    """Whether the innermost function around a divisor has a condition on it."""
    line = divisor.lineno
    around = [c for c in checked if c.first <= line <= c.last]
    inner = max(around, key=lambda c: c.first, default=None)
    return inner is not None and ast.unparse(divisor) in inner.names


_MASK = re.compile(r"(?i)mask|valid|keep|pos|fg|select|inds?$|idx|ignore|where|nonzero")
_MEAN_LOSSES = re.compile(r"(?:l1|mse|smooth_l1|cross_entropy|nll|huber|bce|binary_cross_entropy\w*|kl_div)(?:_loss)?$")


def _filtered_means(tree: ast.AST, checked: list[_Checked], name: str) -> Iterator[Fact]:
    """Means over what a condition lets through: NaN when that is nothing."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        chosen: dict[str, str] = {}  # names that hold only what passed, and the condition
        masks: set[str] = set()  # names of conditions
        nodes = [n for n in ast.walk(function) if isinstance(n, ast.Assign | ast.Call)]
        for node in sorted(nodes, key=lambda n: (n.lineno, n.col_offset)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                mask = _mask_in(node.value, chosen, masks)
                target = node.targets[0].id
                if (
                    not mask
                    and _MASK.search(ast.unparse(node.value))
                    and isinstance(node.value, ast.Call | ast.Compare)
                ):
                    masks.add(target)
                if mask and not re.search(r"\.(?:mean|sum|max|min)\(", ast.unparse(node.value)):
                    chosen[target] = mask
                elif not mask:
                    chosen.pop(target, None)
            if isinstance(node, ast.Call) and (mask := _averages(node, chosen, masks)):
                inner = max((c for c in checked if c.first <= node.lineno <= c.last), key=lambda c: c.first)
                if not any(re.search(rf"\b{re.escape(mask)}\b", n) for n in inner.names):
                    words = f"`{ast.unparse(node)[:90]}` is NaN where `{mask}` lets nothing through"
                    yield _fact("divides-by-count", name, node, words)
                    return


def _mask_in(value: ast.expr, chosen: dict[str, str], masks: set[str]) -> str:
    """The condition that a value was filtered by."""
    for node in ast.walk(value):
        if isinstance(node, ast.Subscript):
            index = node.slice.operand if isinstance(node.slice, ast.UnaryOp) else node.slice
            if isinstance(index, ast.Compare):
                return ast.unparse(index)
            if (
                isinstance(index, ast.Name)
                and (index.id in masks or _MASK.search(index.id))
                and isinstance(node.ctx, ast.Load)
            ):
                return index.id
        if isinstance(node, ast.Name) and node.id in chosen:
            return chosen[node.id]
    return ""


def _averages(node: ast.Call, chosen: dict[str, str], masks: set[str]) -> str:
    """The condition behind what a call averages over everything it is given; "" for other calls."""
    callee = dotted(node.func).rpartition(".")[2] or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
    shown = ast.unparse(node)
    if callee == "mean" and isinstance(node.func, ast.Attribute):
        plain = not node.args and not node.keywords  # over all of it
        over = node.args[0] if node.args and dotted(node.func) in ("torch.mean", "th.mean") else node.func.value
        return _mask_in(over, chosen, masks) if plain or over is not node.func.value else ""
    if _MEAN_LOSSES.match(callee) and node.args and "reduction" not in shown:
        return _mask_in(node.args[0], chosen, masks)
    return ""


def _division(node: ast.BinOp, norms: frozenset[str], name: str) -> Iterator[Fact]:
    below = ast.unparse(node.right)
    shown = ast.unparse(node)[:90]
    above = ast.unparse(node.left)
    if re.search(r"\.std\(", below) and "mean" in above:
        yield _fact("divides-by-std", name, node, f"`{shown}`: the std of a single element is NaN")
    elif below in norms or (
        re.search(r"(?<!linalg)\.norm\(", below) and not re.search(r"\bnp\.|numpy", below) and not _SAFE.search(below)
    ):
        yield _fact("pole-in-code", name, node, f"`{shown}` divides by a norm that can be 0")
    elif re.search(r"(max|min|std|norm)\(", below) and not _SAFE.search(below) and _same_root(above, below):
        yield _fact("scales-by-itself", name, node, f"`{shown}` divides by 0 for a constant or silent sample")
    elif (
        _COUNT.search(below)
        and not re.search(r"clamp|max\(|eps|1e-|\+ ?1|or 1", below)
        and (re.search(r"sum|loss|pos|mask", above) or re.fullmatch(_COUNTS, below))
    ):
        yield _fact("divides-by-count", name, node, f"`{shown}` is 0 / 0 for a batch without targets")


def _same_root(above: str, below: str) -> bool:
    names = set(re.findall(r"[A-Za-z_]\w*", above)) - {"np", "torch", "self", "numpy"}
    return bool(names & set(re.findall(r"[A-Za-z_]\w*", below)))


def _assignment(node: ast.Assign, seen: _Seen, name: str) -> Iterator[Fact]:
    target = dotted(node.targets[0])
    if target.endswith("padding_side") and constant(node.value) == "left":
        yield _fact("left-padding", name, node, "padding_side = 'left' during training")
    if re.search(r"sched\w*\.last_epoch$", target):
        seen.last_epoch_set = node.lineno
    made = node.value
    if isinstance(made, ast.Call) and "requires_grad=True" in (shown := ast.unparse(made)):
        raw = next((r for r in _RAW[:4] if re.search(rf"\b{re.escape(r)}\(\d", shown)), "")
        if raw:
            yield _fact("raw-parameters", name, node, f"`{ast.unparse(node)[:80]}` begins with uninitialized memory")
    targets, values = [node.targets[0]], [made]
    if isinstance(targets[0], ast.Tuple) and isinstance(made, ast.Tuple):  # self.u, self.v = Parameter(…), Parameter(…)
        targets, values = targets[0].elts, made.elts
    for to, value in zip(targets, values, strict=False):
        if _is_raw(value):
            seen.parameters[dotted(to).rpartition(".")[2]] = value.lineno


def _is_raw(made: ast.expr) -> bool:
    """Whether an expression makes a parameter of memory as it is found."""
    if not (isinstance(made, ast.Call) and dotted(made.func).rpartition(".")[2] == "Parameter" and made.args):
        return False
    inner = made.args[0]
    listed = isinstance(inner, ast.Call) and bool(inner.args) and isinstance(inner.args[0], ast.List)
    return isinstance(inner, ast.Call) and dotted(inner.func) in _RAW and not listed

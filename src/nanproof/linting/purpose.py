"""What a piece of code is for: does it train, or only measure, log, prepare data, draw?

A division by zero in a metric spoils one number on a screen; in a loss or a forward pass it spoils the model. Rules
about numerics ask `trains` first, and `only_logged` about a value that a training step merely reports.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import TYPE_CHECKING

from .gradients import Function, callers_of, enclosing, gradless
from .names import called_last, dotted
from .training import loss_like
from .values import made_of

if TYPE_CHECKING:
    from .source import Module

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_LOSSES = re.compile(
    r"loss|criterion|objective|penalty|elbo|(^|_)(nll|kl|kld|bce|mse|ce|info_?nce)(_|$)|regulari[sz]|diverg|geodesic|"
    r"chamfer|focal(?!_length)|triplet|contrastive",
    re.I,
)
_ASIDE = re.compile(
    r"(^|_)(eval(?!uate_(actions?|log))\w*|val|valid|validat\w*|test\w*|predict\w*|infer\w*|metrics?|iou|acc|accura\w*|errors|epe|aepe|psnr|ssim|miou|fid|rm[sS][ed]|"
    r"mae|plot\w*|draw\w*|show|vis\w*|logging|logger|print\w*|summar\w*|report\w*|debug\w*|diagnos\w*|stats?|"
    r"statistics|targets?|monitor\w*|track\w*|analy\w*|bench\w*|profil\w*|collate\w*|augment\w*|preprocess\w*|postprocess\w*|"
    r"prepro\w*|load\w*|save\w*|read\w*|write\w*|export\w*|convert\w*|quanti[sz]e\w*|dequant\w*|init\w*|reset\w*|"
    r"build\w*|setup|make|create|register|generate\w*|sample|sampler|sampling|schedul\w*|warm_?up|anneal\w*|betas?|"
    r"alphas?|sigmas?|timesteps?|lr|seed|getitem|iter|repr|str|len|calibrat\w*|retriev\w*|"
    r"tokeni[sz]e\w*|download|parse\w*|demo|example|beam\w*|search\w*|greedy|detect|match\w*|filter\w*)(_|$)|^log(s|ging)?$|^log_"
    r"(metric|stat|image|step|epoch|result|scalar|info|dict|hist|grad|weight|sample|train|val|test|to|every|batch|loss)",
    re.I,
)
_ASIDE_CLASS = re.compile(
    r"(^|_)(metrics?|meters?|recall|accuracy|evaluat\w*|corrector|langevin|data_?sets?|data_?loader|data_?module|collat\w*|optimi[sz]er|"
    r"schedul\w*|augment\w*|callbacks?|logger|writer|processor|tokeni[sz]er|sampler|environment|env|bench_?mark\w*|"
    r"visuali\w*|plot\w*|monitor|observer|quanti[sz]\w*|export\w*|test|inference|pretrained|predictor|config|tracker|adamw?|sgd)(_|$)|"
    r"(^|_)(transform|scaler|normali[sz]er|buffer)$",
)
"""Of names in snake case: an AsymmetricLoss is no metric, a Parameterization no meter."""
_NETWORK = re.compile(r"(Module|Layer|Loss|Model|Network|Net|Block|Head|Encoder|Decoder|Criterion|Attention|Trainer)$")
_TARGETS = re.compile(r"^(targets?|labels?|gts?|y_true|ground_?truths?)$")
_CUTS = {"item", "detach", "tolist", "numpy", "cpu", "argmax", "argmin", "long", "int", "round", "format", "print"}
_SINKS = re.compile(
    r"(^|_)(log|logs|logger|logging|metrics?|stats?|writer|tracker|meters?|wandb|history|info|extra|reports?)", re.I
)
_MEASURES = re.compile(
    r"(^|_)(acc|accuracy|correct|precision|recall|f1|iou|miou|auc|psnr|ssim|snr|rmsd|rate|frac|fraction|percent\w*|perplexity|"
    r"ppl|metrics?|clipfracs?|approx_kl|hit|hits|usage|coverage|sparsity|err_rate|error_rate|avg_len\w*|stats?)(_|$|\d)",
    re.I,
)


def aside(node: ast.AST, module: Module) -> bool:
    """Whether a place measures, logs, draws, prepares data or has gradients off: nothing is trained through it."""
    if module.is_test or gradless(node, module):
        return True
    functions = enclosing(node, module)
    classes = [p.name for p in module.parents(node) if isinstance(p, ast.ClassDef)]
    bases = [dotted(b).rpartition(".")[2] for p in module.parents(node) if isinstance(p, ast.ClassDef) for b in p.bases]
    if any(_aside_class(c) for c in [*classes, *bases]) and not _invertible(node, module):
        return True
    if any(_LOSSES.search(f.name) for f in functions) and not any(f.name.startswith("log_") for f in functions):
        return False
    named = [f for f in functions if _ASIDE.search(f.name.strip("_"))]
    return bool(named) and not any(_called_in_training(f, module) for f in named)


def _called_in_training(function: Function, module: Module) -> bool:
    """Whether a loss or a function that goes backward in this file calls a function, whatever its name says."""
    if _MEASURED.search(function.name.strip("_")):
        return False
    for call in callers_of(function, module):
        around = enclosing(call, module)
        if any(_LOSSES.search(f.name) or f.name in ("forward", "training_step") for f in around) or any(
            _goes_backward(f, module) for f in around
        ):
            return not only_logged(call, module, 1) and not gradless(call, module)
    return False


_MEASURED = re.compile(
    r"(^|_)(eval\w*|val|valid\w*|test\w*|metrics?|acc\w*|plot\w*|draw\w*|show|vis\w*|log\w*|print\w*|report\w*|save\w*|"
    r"load\w*|init\w*|reset\w*|build\w*|setup|seed|lr|schedul\w*|augment\w*|collate\w*|generate\w*|predict\w*|infer\w*)(_|$)",
    re.I,
)
"""Names of what is never trained through, even where a training step calls it."""


@cache
def _aside_class(name: str) -> bool:
    """Whether a class is for something else than training, by its name; a loss of metric learning is not."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return bool(_ASIDE_CLASS.search(snake)) and not _LOSSES.search(snake)


def _invertible(node: ast.AST, module: Module) -> bool:
    """A transform of a normalizing flow, which is trained; those of data have no inverse."""
    klass = module.klass(node)
    return klass is not None and any(isinstance(s, ast.FunctionDef) and s.name == "inverse" for s in klass.body)


def trains(node: ast.AST, module: Module) -> bool:
    """Whether a place is part of a loss, a forward pass or a training step, gradients included."""
    return not aside(node, module) and _trains(node, module, frozenset())


def _trains(node: ast.AST, module: Module, seen: frozenset[ast.AST]) -> bool:
    functions = enclosing(node, module)
    classes = [p for p in module.parents(node) if isinstance(p, ast.ClassDef)]
    if any(_LOSSES.search(f.name) for f in functions):
        return True
    if not functions:
        return not classes and any(_differentiates(p, module) for p in module.parents(node) if isinstance(p, _LOOPS))
    if any(is_network(c, module) for c in classes):
        return True
    if any(_makes_loss(f, module) for f in functions):
        return not _before_the_loop(node, functions, module)
    callers = [c for f in functions if f not in seen for c in callers_of(f, module)]
    if callers and len(seen) < 6:
        return any(not aside(c, module) and _trains(c, module, seen | set(functions)) for c in callers)
    if any(f.name == "__init__" for f in functions):
        return False
    elsewhere = module.trained_elsewhere(functions[-1].name)
    return elsewhere if elsewhere is not None else True


def called_in_training(name: str, module: Module) -> bool | None:
    """Whether a file calls a function of another one where it trains; None when it never calls it."""
    calls = module.calls(name)
    return any(trains(c, module) for c in calls) if calls else None


def _before_the_loop(node: ast.AST, functions: list[Function], module: Module) -> bool:
    """Whether a function trains in a loop and the place is outside of it: data is prepared there, or results shown."""
    passes = [c for c in module.calls("backward", "manual_backward") if module.function(c) in functions]
    loops = [p for c in passes for p in module.parents(c) if isinstance(p, _LOOPS)]
    return bool(loops) and not any(p in loops for p in module.parents(node))


def _differentiates(loop: ast.AST, module: Module) -> bool:
    return any(p is loop for c in module.calls("backward", "manual_backward") for p in module.parents(c))


def in_loss(node: ast.AST, module: Module) -> bool:
    """Whether a place is part of a loss.

    It is in a function or class that is named as one, takes targets or goes backward, in one that such a function
    calls, or it is given the name of a loss.
    """
    return trains(node, module) and _in_loss(node, module, frozenset())


def _in_loss(node: ast.AST, module: Module, seen: frozenset[ast.AST]) -> bool:
    functions = enclosing(node, module)
    klass = module.klass(node)
    if any(_LOSSES.search(f.name) for f in functions) or (klass is not None and bool(_LOSSES.search(klass.name))):
        return True
    owner = module.statement(node)
    stored = getattr(owner, "targets", [getattr(owner, "target", None)])
    if any(loss_like(dotted(t)) for t in stored if t is not None):
        return True
    if any(_goes_backward(f, module) or _takes_targets(f) for f in functions):
        return True
    callers = [c for f in functions if f not in seen for c in callers_of(f, module)]
    return len(seen) < 4 and any(
        not aside(c, module) and _in_loss(c, module, seen | set(functions)) and not only_logged(c, module, 1)
        for c in callers
    )


def _takes_targets(function: Function) -> bool:
    names = {a.arg for a in [*function.args.args, *function.args.kwonlyargs]}
    return any(_TARGETS.search(n) for n in names) and not names & {"source", "src"}  # the ends of an edge


def _goes_backward(function: Function, module: Module) -> bool:
    return any(p is function for c in module.calls("backward", "manual_backward") for p in module.parents(c))


def is_network(klass: ast.ClassDef, module: Module) -> bool:
    """Whether a class is a layer, a model or a loss: by what it inherits from, or because it has a forward."""
    bases = [module.called(b) or dotted(b) for b in klass.bases]
    if any(_NETWORK.search(b) for b in bases):
        return True
    return any(isinstance(s, ast.FunctionDef) and s.name in ("forward", "training_step") for s in klass.body)


def _makes_loss(function: Function, module: Module) -> bool:
    """Whether a function goes backward, or gives a value the name of a loss."""
    for part in ast.walk(function):
        if isinstance(part, ast.Call) and called_last(part, module) in ("backward", "manual_backward"):
            return True
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store) and loss_like(part.id):
            return True
    return False


def only_logged(node: ast.AST, module: Module, steps: int = 3) -> bool:
    """Whether a value is reported and never trained on: detached, made a number, put among metrics."""
    at = node
    for outer in module.parents(node):
        if isinstance(outer, ast.Call) and (_cuts(outer, at, module) or _collected(outer, at, module, steps)):
            return True
        if isinstance(outer, ast.Attribute) and outer.attr == "data":
            return True
        if isinstance(outer, ast.Return) and steps > 0:
            function = module.function(outer)
            callers = callers_of(function, module) if isinstance(function, ast.FunctionDef) else []
            return bool(callers) and all(only_logged(c, module, steps - 1) for c in callers)
        if isinstance(outer, ast.stmt):
            return steps > 0 and _stored_for_log(outer, module, steps - 1)
        if isinstance(outer, ast.Compare | ast.FormattedValue | ast.Lambda):
            return not isinstance(outer, ast.Lambda)
        at = outer
    return False


def _cuts(call: ast.Call, part: ast.AST, module: Module) -> bool:
    """Whether nothing trains on what this call makes of its part."""
    last = called_last(call, module)
    if last in _CUTS or module.called(call) in ("float", "int", "bool", "print", "str"):
        return True
    if module.operation(call) is not None:
        return False  # torch.log is no log
    receiver = module.receiver(call)
    return part is not call.func and (bool(_SINKS.search(receiver.rpartition(".")[2])) or bool(_SINKS.search(last)))


def _collected(call: ast.Call, part: ast.AST, module: Module, steps: int) -> bool:
    """``values.append(x)``, where all that is done with the list afterwards is to report it."""
    func = call.func
    if not (isinstance(func, ast.Attribute) and func.attr == "append" and isinstance(func.value, ast.Name)):
        return False
    if part is func or steps <= 0:
        return False
    uses = [u for u in module.uses(func.value, module.function(call)) if u.lineno > call.lineno]
    read = [u for u in uses if not _asked_for_length(u, module) and not isinstance(module.parent(u), ast.Attribute)]
    return 0 < len(read) < 6 and all(only_logged(u, module, steps - 1) for u in read)


def _asked_for_length(use: ast.AST, module: Module) -> bool:
    parent = module.parent(use)
    return isinstance(parent, ast.Call) and module.called(parent) == "len"


def _stored_for_log(statement: ast.stmt, module: Module, steps: int) -> bool:
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return all(_measured(t, statement, module, steps) for t in targets)
    return False


def _measured(target: ast.expr, statement: ast.stmt, module: Module, steps: int) -> bool:
    """Whether what is stored here is a metric: by its name, or because every use of it only reports it."""
    if isinstance(target, ast.Subscript):
        key = target.slice.value if isinstance(target.slice, ast.Constant) else ""
        return bool(_SINKS.search(dotted(target.value).rpartition(".")[2])) and not loss_like(str(key))
    name = dotted(target).rpartition(".")[2]
    if _MEASURES.search(name) and not loss_like(name) and not in_loss(statement, module):
        return True
    if not isinstance(target, ast.Name):
        return False
    uses = [u for u in module.uses(target, module.function(statement)) if u.lineno > statement.lineno]
    return bool(uses) and len(uses) < 12 and all(only_logged(u, module, steps) for u in uses)


def counts_hits(node: ast.AST, module: Module) -> bool:
    """Whether an expression counts right predictions, a number without a gradient."""
    for part in made_of(node, module, limit=300):
        if isinstance(part, ast.Call) and called_last(part, module) in ("argmax", "argmin"):
            return True
        sides: list[ast.expr] = []
        if isinstance(part, ast.Compare) and any(isinstance(o, ast.Eq) for o in part.ops):
            sides = [part.left, *part.comparators]
        elif isinstance(part, ast.Call) and called_last(part, module) == "eq":
            sides = [*part.args, *([part.func.value] if isinstance(part.func, ast.Attribute) else [])]
        if any("pred" in dotted(s) for s in sides) and not any(isinstance(s, ast.Constant) for s in sides):
            return True
    return False

"""The settings that were in force: precision, rate, batch and the rest, wherever they are written, best source first.

>>> from nanproof.diagnosing.sources.in_force import read_header
>>> text = "Overriding: learning_rate = 0.6\\nUsing 16bit Automatic Mixed Precision (AMP)\\nstep 1 loss 2.3 lr 1e-4"
>>> [(s.concept, s.value, s.where) for s in read_header(text, "train.log")]
[('lr', 0.6, 'train.log:1'), ('precision', 'fp16', 'train.log:2')]

What the log says was in force beats the command line, which beats a config, which beats the code's defaults. Values
that differ between sources are kept: a contradiction is a finding.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...config.meaning import concepts_of
from ...config.optimizers import highest_rate, scales_rate
from ...config.value import Settings
from ...files import open_file
from ..bugs import read_versions
from ..evidence import Fact
from ..machines import find_family, read_hardware
from .part import shorten

Plain = str | float | bool
LOG, COMMAND, RUN_CONFIG, CONFIG, CODE, DEFAULT = range(6)
HEADER_LINES = 400
MAX_BYTES = 2 << 20
SHOWN = ("precision", "weights", "lr", "optimizer", "batch", "accum", "clip", "warmup", "gpu", "torch", "compile")
"""The rows of the table, in this order."""
_CONCEPTS = {
    "lr": "lr",
    "batch_size": "batch",
    "accumulation": "accum",
    "clip_norm": "clip",
    "optimizer": "optimizer",
    "warmup_steps": "warmup",
    "eps": "eps",
    "beta2": "beta2",
    "weight_decay": "wd",
    "scheduler": "scheduler",
}
TRAINER = "TrainingArguments"
FINE_TUNING = 1e-3
"""The rate above which pretrained weights rarely survive AdamW, which the Trainer of transformers takes by default."""
_NOT_LR = re.compile(r"min|end|final|decay|warm|sched|mult|ratio|factor|text|scale")
_LR = re.compile(r"^(?:.*_)?(?:lr|learning_?rate)$")
_BATCH = re.compile(r"^(?:ims_per_batch|batch|batchsize|.*_batch_size|batch_size_.*)$")
_FP16 = re.compile(r"^(?:use_|enable_|do_)?(?:fp16|float16|half)(?:_run|_enabled|_mode|_training)?$")
_BF16 = re.compile(r"^(?:use_|enable_)?(?:bf16|bfloat16)(?:_enabled)?$")
_FP8 = re.compile(r"^(?:use_|enable_)?fp8(?:_format|_recipe|_enabled)?$")
_AMP = re.compile(r"^(?:use_|enable_|with_|native_|torch_)?amp(?:_enabled)?$|^use_mixed_precision$")
_WORD = re.compile(r"^(?:mixed_?precision|precision|amp_dtype|autocast_dtype|dtype|train_dtype|compute_dtype|ptdtype)$")
_DTYPES = {
    "float16": "fp16",
    "fp16": "fp16",
    "half": "fp16",
    "16": "fp16",
    "16-mixed": "fp16",
    "f16": "fp16",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "float32": "fp32",
    "fp32": "fp32",
    "32": "fp32",
    "32-true": "fp32",
    "no": "fp32",
    "none": "fp32",
    "full": "fp32",
    "16-true": "fp16",
    "fp8": "fp8",
    "tf32": "fp32",
    "single": "fp32",
    "amp_bf16": "bf16",
    "amp_fp16": "fp16",
    "amp": "fp16",
}
_BANNERS: tuple[tuple[str, str, Plain], ...] = (
    (r"Using 16-?bit (?:native )?(?:Automatic )?Mixed Precision|Using native 16bit precision", "precision", "fp16"),
    (r"Using bfloat16 Automatic Mixed Precision", "precision", "bf16"),
    (r"\bAMP\b(?! not).{0,12}\b(?:is )?(?:enabled|on)\b|native (?:torch|pytorch) AMP", "precision", "fp16 (amp)"),
    (r"\b(?:enable|using|with) (?:full )?fp16 training", "precision", "fp16"),
    (r"Selected optimization level O[12]|opt_level\s*[:=]\s*'?O[123]", "precision", "fp16"),
    (r"fp16_enabled\W+true|\bfp16 (?:is )?enabled\b|Using (?:half|fp16) precision", "precision", "fp16"),
    (r"bfloat16_enabled\W+true|\bbf16 (?:is )?enabled\b", "precision", "bf16"),
    (r"mixed[_ ]precision(?: type)?\W+fp16\b", "precision", "fp16"),
    (r"\bfp16\s*=\s*dict\(|['\"]?AmpOptimWrapper\b(?!.*bfloat16)|Fp16OptimizerHook", "precision", "fp16"),
    (r"mixed[_ ]precision(?: type)?\W+bf16\b", "precision", "bf16"),
    (r"\b(?:grad\w*|weights?|bias|param\w*)\b.{0,80}\bdtype\W{1,3}torch\.(?:float16|half)\b", "weights", "fp16"),
    (r"^YOLOv5\b.*\bCUDA:\d", "precision by default", "fp16 (amp)"),
    (r"\bUsing mps device|--mps\b", "gpu", "Apple M-series (mps)"),
    (r"\bcompiling the model\b|torch\.compile\b.*(?:enabled|true)", "compile", True),
)
_BANNER = [(re.compile(p, re.IGNORECASE), concept, value) for p, concept, value in _BANNERS]
_PAIR = re.compile(
    r"(?<![\w./])['\"]?(?P<key>[A-Za-z_][\w.-]{0,50})['\"]?\s{0,12}(?::|=)\s{0,6}(?P<value>'[^']{0,60}'|\"[^\"]{0,60}\"|[\w.+-]++)(?!\s*=)"
)
_SPACED = re.compile(
    r"^\s*(?P<key>learning[ _]rate|lr|batch[ _]size|fp16[ _]run)(?:\s*[:=]\s*|\s+(?=[\d.]+(?:e-?\d+)?\s*$))"
    r"(?P<value>[\d.eE+-]+|true|false)",
    re.IGNORECASE,
)
_ROW = re.compile(
    r"(?i)\b(?:step|iter\w*|epoch|it|batch)\b\W{0,4}\[?\d.*(?:loss|nan)|loss\W{0,3}(?:nan|[-\d])|it/s|s/it"
)
_ARGUMENTS = re.compile(
    r"Overriding|\{['\"]\w{1,40}['\"]: ?[{'\"\w]|Namespace\(|Arguments\(|[Cc]onfig|[Aa]rgs|[Hh]yper|trainer:"
    r"|[Ss]ettings|^\s*\W{0,3}[A-Za-z_][\w. ]{1,40}\s*[:=]"
)
_GPU = re.compile(
    r"(?i)(?:NVIDIA|GeForce|Tesla|Quadro|\bRTX|\bGTX|\bA100|\bH100|\bV100|Apple M\d|\bdevice\b\W{1,6}mps|AMD Instinct"
    r"|\bMI\d{3}|\bgfx\d{3,4}|Radeon|\bROCm\b)(?:[^,;)|\n.]|\.\d){0,50}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One value of one concept, with its place; the lowest ``rank`` is in force."""

    concept: str
    value: Plain
    where: str
    rank: int
    key: str = ""

    @property
    def shown(self) -> str:
        if isinstance(self.value, bool):
            return str(self.value).lower()
        return f"{self.value:g}" if isinstance(self.value, float) else self.value


def read_header(text: str, name: str) -> Iterator[Setting]:
    """The arguments and banners that a log prints before its rows, and overrides anywhere."""
    for number, line in enumerate(text.splitlines()[:HEADER_LINES], start=1):
        where = f"{name}:{number}"
        for pattern, concept, value in _BANNER:
            if pattern.search(line):
                name, _, default = concept.partition(" by ")
                yield Setting(concept=name, value=value, where=where, rank=DEFAULT if default else LOG)
        found = _GPU.search(line)
        if found and find_family(found[0]):
            yield Setting(concept="gpu", value=found[0].strip(" .-"), where=where, rank=LOG)
        if _ROW.search(line) and "Overriding" not in line and "trainer:" not in line:
            continue
        spaced = _SPACED.match(line)
        if spaced:
            yield from interpret(spaced["key"].replace(" ", "_"), plain_value(spaced["value"]), where, LOG)
        elif _ARGUMENTS.search(line):
            for pair in _PAIR.finditer(line[:4000]):
                yield from interpret(pair["key"], plain_value(pair["value"].strip("'\"")), where, LOG)


def plain_value(text: str) -> Plain:
    """A text as the number or the switch that it stands for."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return float(text)
    except ValueError:
        return text


def interpret(key: str, value: object, where: str, rank: int) -> Iterator[Setting]:
    """What a key and its value mean, if they mean one of the settings that matter here."""
    key = re.sub(r"\.\d+$", "", key)  # a rate for each of several epochs
    name = key.rpartition(".")[2].lower().replace("-", "_")
    parent = key.rpartition(".")[0].lower().rpartition(".")[2]
    if value is None or isinstance(value, list | dict | tuple):
        return
    plain: Plain = value if isinstance(value, str | float | bool) else str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        plain = float(value)

    def setting(concept: str, meant: Plain) -> Setting:
        return Setting(concept=concept, value=meant, where=where, rank=rank, key=key)

    number = plain if isinstance(plain, float) and not isinstance(plain, bool) else None
    if isinstance(plain, str):
        try:
            number = float(plain)
        except ValueError:
            number = None
    word = str(plain).lower().removeprefix("torch.")
    on, off = plain is True or word in ("true", "1.0", "yes", "on"), plain is False or word in ("false", "0.0", "off")
    if key.startswith("deepspeed.") or (name in ("deepspeed", "deepspeed_config") and isinstance(value, str)):
        yield setting("master-weights", "DeepSpeed")
    elif "colossalai" in str(value).lower():
        yield setting("master-weights", "ColossalAI")
    if (_FP16.match(name) or (name == "enabled" and parent == "fp16")) and (on or off):
        yield from [setting("precision", "fp16")] if on else []
    elif (_BF16.match(name) or (name == "enabled" and parent in ("bf16", "bfloat16"))) and on:
        yield setting("precision", "bf16")
    elif _FP8.match(name) and not off and word not in ("none", "null", ""):
        yield setting("precision", "fp8")
    elif _AMP.match(name) and (on or off):
        yield setting("precision", "fp16 (amp)" if on else "fp32")
    elif name in ("torch_dtype", "model_dtype", "weight_dtype") and word in _DTYPES:
        yield setting("weights", _DTYPES[word])
    elif _WORD.match(name) and (word.removesuffix(".0") in _DTYPES):
        yield setting("precision", _DTYPES[word.removesuffix(".0")])
        if word == "16-true":
            yield setting("weights", "fp16")
    elif name == "opt_level" and word in ("o1", "o2", "o3"):
        yield setting("precision", "fp16")
    elif name in ("torch_compile", "compile", "compile_model", "use_compile", "compile_loss") and on:
        yield setting("compile", True)
    elif name in ("attn_implementation", "_attn_implementation") and isinstance(plain, str):
        yield setting("attention", "flash" if "flash" in word else word)
    elif name in ("flash_attn", "use_flash_attn", "use_flash_attention_2", "flash_attention") and on:
        yield setting("attention", "flash")
    elif number is not None and (_LR.match(name) or (concepts_of(key) and concepts_of(key)[0][0] == "lr")):
        if not _NOT_LR.search(name):
            yield setting("lr", number)
    elif number is not None and _BATCH.match(name):
        yield setting("batch", number)
    else:
        for concept, _ in concepts_of(key)[:1]:
            if concept in ("optimizer", "scheduler"):
                yield from [setting(concept, word)] if number is None and word != "dict" else []
            elif concept in _CONCEPTS and number is not None:
                yield setting(_CONCEPTS[concept], number)


def read_settings(settings: Settings, name: str, root: Path, rank: int) -> Iterator[Setting]:
    """The settings of a config or launch script that was loaded."""
    for value in settings:
        if value.known:
            where = shorten(value.where, root) if value.path else name
            yield from interpret(value.key, value.value, where, rank)


def read_python(tree: ast.AST, name: str, *, rank: int = CODE) -> Iterator[Setting]:
    """Constants, attributes, defaults of arguments, dataclasses and keyword arguments of calls.

    >>> tree = ast.parse("cfg.SOLVER.BASE_LR = 0.1\\np.add_argument('--fp16', default=True)\\nAdam(ps, lr=1e-3)")
    >>> [(s.concept, s.value) for s in read_python(tree, "train.py")]
    [('lr', 0.1), ('precision', 'fp16'), ('optimizer', 'adam'), ('lr', 0.001)]
    """
    for node in ast.walk(tree):
        where = f"{name}:{getattr(node, 'lineno', 1)}"
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            value = constant(node.value)
            if isinstance(node.value, ast.Call) and dotted(node.value.func) == "dict":
                value = value if _name(targets[0]) not in ("fp16", "bf16") else True  # fp16 = dict(loss_scale=512.)
            for target in targets:
                if value is not None and (key := _name(target)):
                    yield from interpret(key, value, where, rank)
        elif isinstance(node, ast.Dict):
            for key_node, value_node in zip(node.keys, node.values, strict=True):
                key_value, value = constant(key_node), constant(value_node)
                if isinstance(key_value, str) and value is not None:
                    yield from interpret(key_value, value, where, rank)
        elif isinstance(node, ast.Call):
            yield from _call(node, name, where, rank)


_OPTIMIZERS = re.compile(r"^(?:Fused)?(Adam\w*|SGD|RMSprop|Adafactor|Lion|RAdam|NAdam|LAMB|Adagrad|Adadelta|LBFGS)$")


def _call(node: ast.Call, name: str, where: str, rank: int) -> Iterator[Setting]:
    callee = dotted(node.func).rpartition(".")[2]
    keywords = {k.arg: constant(k.value) for k in node.keywords if k.arg}
    if callee == "add_argument" and node.args:
        key, default = constant(node.args[0]), keywords.get("default")
        for argument in node.args:
            word = constant(argument)
            key = word if isinstance(word, str) and word.startswith("--") else key
        if isinstance(key, str) and default is not None:
            yield from interpret(key.lstrip("-"), default, where, DEFAULT)
        return
    if _OPTIMIZERS.match(callee):
        yield Setting(concept="optimizer", value=callee.lower(), where=where, rank=rank, key=callee)
    if callee.endswith("TrainingArguments"):
        yield Setting(concept="optimizer", value="adamw", where=where, rank=DEFAULT, key=TRAINER)
    if callee == "dict" and isinstance(keywords.get("type"), str) and _OPTIMIZERS.match(str(keywords["type"])):
        yield Setting(concept="optimizer", value=str(keywords["type"]).lower(), where=where, rank=rank)
    if callee in ("clip_grad_norm_", "clip_grad_norm", "unscale_and_clip"):
        limit = keywords.get("max_norm", constant(node.args[1]) if len(node.args) > 1 else None)
        if isinstance(limit, float | int):
            yield Setting(concept="clip", value=float(limit), where=where, rank=rank)
    for key, value in keywords.items():
        if value is not None and callee not in ("autocast", "GradScaler", "zeros", "ones", "tensor", "full", "empty"):
            yield from interpret(key, value, where, rank)


def constant(node: ast.expr | None) -> object:
    """The value of a literal, or the name of a dtype such as torch.float16; None for anything else.

    >>> constant(ast.parse("torch.cuda.is_available()").body[0].value), constant(ast.parse("f(x)").body[0].value)
    (True, None)
    """
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = constant(node.operand)
        return -inner if isinstance(inner, int | float) else None
    if isinstance(node, ast.Attribute) and node.attr in ("float16", "bfloat16", "float32", "half", "float64"):
        return f"torch.{node.attr}"
    if isinstance(node, ast.Call) and dotted(node.func) == "torch.cuda.is_available":
        return True  # what was trained was most likely trained on a GPU
    return None


def dotted(node: ast.AST) -> str:
    """``torch.nn.Linear`` of such a node; "" for what is no name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else node.attr
    return ""


def _name(target: ast.AST) -> str:
    if isinstance(target, ast.Subscript) and isinstance(found := constant(target.slice), str):
        return found
    return dotted(target)


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """All settings that were found, and which of them hold."""

    settings: tuple[Setting, ...]

    @classmethod
    def of(cls, settings: Iterable[Setting]) -> InForce:
        ranked = sorted(settings, key=lambda s: s.rank)
        unique = {(s.concept, s.shown, s.where): s for s in reversed(ranked)}
        return cls(settings=tuple(s for s in ranked if unique[s.concept, s.shown, s.where] is s))

    def get(self, concept: str) -> Setting | None:
        found = [s for s in self.settings if s.concept == concept]
        if concept == "precision" and found:  # a switch that is on says more than a default dtype beside it
            best = [s for s in found if s.rank == found[0].rank]
            return max(best, key=lambda s: (s.value == "fp8", s.value != "fp32"))
        return found[0] if found else None

    def others(self, concept: str) -> list[Setting]:
        """Sources that say something else than the one in force."""
        chosen = self.get(concept)
        if chosen is None:
            return []
        found = [s for s in self.settings if s.concept == concept and s.rank > chosen.rank]
        if concept == "lr" and isinstance(chosen.value, float) and chosen.rank == LOG:
            # a schedule stays below the configured rate: only a higher one contradicts it
            found = [s for s in found if isinstance(s.value, float) and not 0 <= chosen.value <= 1.05 * s.value]
        return [s for s in found if s.shown != chosen.shown and not (concept == "precision" and _same(s, chosen))]

    def rows(self) -> Iterator[tuple[str, str, str]]:
        """Concept, value with its place, and what contradicts it."""
        for concept in SHOWN:
            chosen = self.get(concept)
            if chosen is not None:
                other = self.others(concept)[:1]
                clash = f"not {other[0].shown} ({other[0].where})" if other else ""
                yield concept, f"{chosen.shown} ({chosen.where})", clash

    def facts(self) -> Iterator[Fact]:
        for concept in ("lr", "batch", "accum", "clip", "warmup", "eps", "beta2", "wd"):
            chosen = self.get(concept)
            if chosen is not None and isinstance(chosen.value, float):
                yield Fact(name=concept, value=chosen.value, where=chosen.where, words=f"{concept} {chosen.shown}")
        optimizer = self.get("optimizer")
        if optimizer is not None:
            word = str(optimizer.value).rpartition(".")[2]
            short = "adamw" if "adamw" in word else "adam" if "adam" in word else "sgd" if "sgd" in word else word
            yield Fact(name="optimizer", value=short, where=optimizer.where)
        precision, weights = self.get("precision"), self.get("weights")
        if precision is not None:
            short = str(precision.value).partition(" ")[0]
            yield Fact(name="precision", value=short, where=precision.where, words=f"training in {precision.value}")
        if weights is not None and not self.master_weights:
            yield Fact(name="weights", value=str(weights.value), where=weights.where, words=f"{weights.value} weights")
        if (compiled := self.get("compile")) is not None:
            yield Fact(name="compiled", where=compiled.where, words="the model is compiled")
        if (attention := self.get("attention")) is not None and attention.value in (
            "flash",
            "sdpa",
            "eager",
            "xformers",
        ):
            yield Fact(name="attention", value=attention.value, where=attention.where)
        if (gpu := self.get("gpu")) is not None:
            yield from read_hardware(str(gpu.value), where=gpu.where)
        yield from self._high_rate()

    @property
    def master_weights(self) -> bool:
        """Whether a framework is in force that trains fp32 copies of the weights, whatever they were loaded in."""
        return self.get("master-weights") is not None

    def _is_factor(self) -> bool:
        """Whether the schedule multiplies the configured rate instead of starting from it."""
        scheduler = self.get("scheduler")
        return scheduler is not None and scales_rate(str(scheduler.value))

    def _high_rate(self) -> Iterator[Fact]:
        """Whether the learning rate is far above what its optimizer bears."""
        optimizer, batch = self.get("optimizer"), self.get("batch")
        told = [s for s in self.settings if s.concept == "lr" and isinstance(s.value, float)]
        # the configured peak counts as well: a logged rate may still be warming up
        told = [s for s in told if s.rank < CODE] or [s for s in told if s.rank == CODE] or told
        if self._is_factor():
            told = [s for s in told if not s.key]  # what the rows of a log show is the rate itself
        if not told:
            return
        rate = max(told, key=lambda s: float(s.value) if s.value else 0.0)
        if not isinstance(rate.value, float):
            return
        kind = str(optimizer.value) if optimizer is not None else ""
        usual = highest_rate(kind)
        if optimizer is not None and optimizer.key == TRAINER:
            usual = FINE_TUNING
        sized = "ims_per_batch" in (batch.key.lower() if batch is not None else "")
        if sized and batch is not None and isinstance(batch.value, float):
            usual = 1.9 * 0.02 * batch.value / 16  # detectron2 scales 0.02 for 16 images
        if rate.value < 0:
            yield Fact(name="lr-negative", where=rate.where, words=f"learning rate {rate.value:g}")
        elif rate.value > usual:
            level = "extreme" if rate.value > 8 * usual or rate.value >= max(1.0, 2 * usual) else "high"
            level = "absurd" if rate.value > 200 * usual else level
            beside = f" with {kind}" if kind else ""
            beside += f" for a batch of {batch.shown}" if sized and batch is not None else ""
            words = f"learning rate {rate.value:g}{beside}; {usual:.2g} is the usual limit"
            yield Fact(name="lr-high", value=level, where=rate.where, words=words)


def _same(one: Setting, other: Setting) -> bool:
    return str(one.value)[:4] == str(other.value)[:4]


def read_versions_in(text: str, name: str) -> Iterator[Fact]:
    """Versions in the header of a log: "torch-1.13.1+cu117", "PyTorch version: 2.1.0"."""
    for number, line in enumerate(text.splitlines()[:HEADER_LINES], start=1):
        if not _ROW.search(line):
            plain = re.sub(r"(?i)\b(torch|transformers|deepspeed)-(?=\d)", r"\1 ", line[:2000])
            yield from read_versions(plain, where=f"{name}:{number}")


def head_of(path: Path) -> str:
    with open_file(path) as file:
        return file.read(256 << 10).decode("utf-8", "replace").replace("\r", "\n")

"""The calls in training code that set numerics: trainers, optimizers, schedules, autocast, scalers, clipping.

>>> code = Code.parse("t.py", "import torch\\nwith torch.autocast('cuda', enabled=cfg.amp):\\n    pass\\n")
>>> [call] = find_calls(code)
>>> call.name, call.get("device_type").value, call.get("enabled").text, call.get("dtype")
('autocast', 'cuda', 'cfg.amp', None)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .code import Code, NotConstant
from .value import Value

# The last part of a callable's name, and what its positional arguments are called.
_OPTIMIZER = ("params", "lr")
OPTIMIZERS = frozenset(
    {
        "Adam",
        "AdamW",
        "SGD",
        "RMSprop",
        "Rprop",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "NAdam",
        "RAdam",
        "SparseAdam",
        "ASGD",
        "LBFGS",
        "Adafactor",
        "Lion",
        "Lamb",
        "LAMB",
        "LARS",
        "FusedAdam",
        "FusedLAMB",
        "DeepSpeedCPUAdam",
        "Adam8bit",
        "AdamW8bit",
        "PagedAdamW8bit",
        "PagedAdamW32bit",
        "Lion8bit",
        "Muon",
        "Sophia",
        "SophiaG",
        "Prodigy",
        "DAdaptAdam",
        "DAdaptSGD",
        "AdaBelief",
        "Ranger",
        "Novograd",
        "NovoGrad",
        "Shampoo",
        "SOAP",
    }
)
_POSITIONAL: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(OPTIMIZERS, _OPTIMIZER),
    "OneCycleLR": ("optimizer", "max_lr", "total_steps"),
    "CosineAnnealingLR": ("optimizer", "T_max", "eta_min"),
    "CosineAnnealingWarmRestarts": ("optimizer", "T_0", "T_mult", "eta_min"),
    "NoamAnnealing": ("optimizer",),
    "NoamLR": ("optimizer", "warmup_steps"),
    "NoamOpt": ("model_size", "factor", "warmup", "optimizer"),
    "get_linear_schedule_with_warmup": ("optimizer", "num_warmup_steps", "num_training_steps"),
    "get_cosine_schedule_with_warmup": ("optimizer", "num_warmup_steps", "num_training_steps"),
    "get_constant_schedule_with_warmup": ("optimizer", "num_warmup_steps"),
    "get_scheduler": ("name", "optimizer", "num_warmup_steps", "num_training_steps"),
    "autocast": ("device_type", "dtype", "enabled"),
    "GradScaler": ("device", "init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled"),
    "ShardedGradScaler": ("device", "init_scale"),
    "clip_grad_norm_": ("parameters", "max_norm", "norm_type"),
    "clip_grad_value_": ("parameters", "clip_value"),
    "Accelerator": ("device_placement", "split_batches", "mixed_precision", "gradient_accumulation_steps"),
    "Trainer": (),
    "from_pretrained": ("pretrained_model_name_or_path",),
    "from_config": ("config",),
    "get_peft_model": ("model", "peft_config"),
    "LoraConfig": (),
    "BitsAndBytesConfig": (),
    "MixedPrecision": ("param_dtype", "reduce_dtype", "buffer_dtype"),
    "MixedPrecisionPolicy": ("param_dtype", "reduce_dtype", "output_dtype"),
    "HfArgumentParser": ("dataclass_types",),
    "TrlParser": ("dataclass_types",),
    "set_default_dtype": ("d",),
    "half": (),
    "bfloat16": (),
    "to": ("device",),
}
_OLD = {"autocast": ("enabled", "dtype"), "GradScaler": _POSITIONAL["GradScaler"][1:]}
"""Under ``torch.cuda.amp`` the device is not an argument."""
_TRL = re.compile(r"(SFT|DPO|GRPO|ORPO|KTO|PPO|RLOO|Reward|CPO|BCO|PRM|GKD|OnlineDPO)Config")
_MODEL = re.compile(r"(.*[._])?(model|net|network|unet|module|encoder|decoder|transformer|backbone|vae|llm)\w*$", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call, with its arguments by name; what is no constant has ``known=False`` and its text."""

    name: str
    """The last part: ``autocast``, ``TrainingArguments``, ``AdamW``."""
    dotted: str
    """As far as imports tell: ``torch.cuda.amp.autocast``."""
    receiver: str
    """The source before the last dot: ``model`` in ``model.half()``."""
    path: str
    line: int
    arguments: Mapping[str, Value]
    starred: bool = False
    """Whether ``**something`` may bring arguments that are not seen here."""
    condition: Value | None = None
    """``amp`` in ``autocast(…) if amp else nullcontext()``."""

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"

    def get(self, name: str) -> Value | None:
        return self.arguments.get(name)


def is_arguments(name: str) -> bool:
    """Whether a class is one of the argument classes of the HF trainers."""
    return name.endswith("TrainingArguments") or bool(_TRL.fullmatch(name))


def find_calls(code: Code) -> tuple[Call, ...]:
    """Every call of the vocabulary above, in the order of the source."""
    known: tuple[Call, ...] | None = code.memory.get("calls")
    if known is None:
        known = code.memory["calls"] = _find_calls(code)
    return known


def _find_calls(code: Code) -> tuple[Call, ...]:
    found: list[Call] = []
    targets: dict[int, str] = {}
    conditions: dict[int, ast.expr] = {}
    for node in code.nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            targets[id(node.value)] = code.text(node.targets[0])
        elif isinstance(node, ast.IfExp):
            conditions[id(node.body)] = node.test
        elif isinstance(node, ast.Call) and (call := read_call(code, node, targets.get(id(node), ""))):
            test = conditions.get(id(node))
            found.append(call if test is None else replace(call, condition=_argument(code, call.name, "if", test)))
    return tuple(sorted(found, key=lambda c: c.line))


def read_call(code: Code, node: ast.Call, target: str = "") -> Call | None:
    """The call behind a node, if it is one that sets numerics; ``target`` is the name that its result gets."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if name not in _POSITIONAL and not is_arguments(name):
        dotted = code.dotted(node.func)
        name = dotted.rpartition(".")[2]
        if name not in _POSITIONAL and not is_arguments(name):
            return None
    dotted = code.dotted(node.func) or name
    receiver = code.text(node.func.value) if isinstance(node.func, ast.Attribute) else ""
    if name in ("half", "bfloat16", "to") and not _casts_model(name, receiver, target, node):
        return None
    names = _POSITIONAL.get(name, ("output_dir",))
    if ".cuda.amp" in dotted or ".cpu.amp" in dotted:
        names = _OLD.get(name, names)
    arguments = {n: _argument(code, name, n, a) for n, a in zip(names, node.args, strict=False)}
    if name == "to":
        arguments = dict([("dtype", _argument(code, name, "dtype", a)) for a in node.args if _is_dtype(code, a)][:1])
    arguments |= {k.arg: _argument(code, name, k.arg, k.value) for k in node.keywords if k.arg}
    if name == "to" and "dtype" not in arguments:
        return None
    return Call(
        name=name,
        dotted=dotted,
        receiver=receiver,
        path=code.path,
        line=node.lineno,
        arguments=arguments,
        starred=any(k.arg is None for k in node.keywords) or any(isinstance(a, ast.Starred) for a in node.args),
    )


def _casts_model(name: str, receiver: str, target: str, node: ast.Call) -> bool:
    if name != "to" and (node.args or node.keywords):
        return False
    return bool(_MODEL.match(re.sub(r"\(.*\)|\[.*\]", "", receiver, flags=re.S)) or _MODEL.match(target))


def _is_dtype(code: Code, node: ast.expr) -> bool:
    try:
        value = code.fold(node)
    except NotConstant:
        return "dtype" in code.text(node)
    return isinstance(value, str) and "float" in value


def _argument(code: Code, call: str, name: str, node: ast.expr) -> Value:
    return code.setting(f"{call}.{name}", node, "call")

"""Facts about a file, and about all files linted together, that decide whether a pattern is a mistake."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from .names import word_set

if TYPE_CHECKING:
    from .source import Module

_HARMLESS = word_set("requires_grad_ zero_ mul_ div_")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """What is in play."""

    torch: bool = False
    scaler: bool = False
    """A GradScaler is made, or something called scaler scales a loss."""
    unscale: bool = False
    scaler_step: bool = False
    scaler_update: bool = False
    autocast: bool = False
    autocast_dtypes: frozenset[str] = frozenset()
    """"float16", "bfloat16", "default" (no dtype given), "unknown" (given as a variable)."""
    half: bool = False
    """float16 is used for anything: weights, autocast, a Trainer's setting."""
    bf16: bool = False
    ddp: bool = False
    fsdp1: bool = False
    fsdp2: bool = False
    deepspeed: bool = False
    optimizer: bool = False
    """An optimizer is made or stepped."""
    optimizers: frozenset[str] = frozenset()
    """Names of the optimizer classes made: "Adam", "SGD", …"""
    backward: bool = False
    clip: bool = False
    initializes: bool = False
    """Something goes through all parameters or modules and initializes them."""
    trainer: frozenset[str] = frozenset()
    """Who runs the loop: "transformers", "lightning", "accelerate", "trl", "deepspeed"."""
    all_reduce: bool = False
    """A collective that lets ranks agree: all_reduce, all_gather, reduce, gather, broadcast."""
    all_reduce_loss: bool = False
    """… and one of its arguments is a loss or a flag about it."""


ProjectFacts = FileFacts

TORCH = (b"torch", b"lightning", b"transformers", b"accelerate", b"deepspeed", b"trl", b"diffusers", b"peft")
"""A file without any of these words has nothing to do with torch."""

# For each fact, words of which one stands in the text of every file that has it: most files need not be parsed to know.
HINTS: dict[str, tuple[bytes, ...]] = {
    "torch": TORCH,
    "scaler": (b"caler",),
    "unscale": (b"unscale_",),
    "scaler_step": (b"caler",),
    "scaler_update": (b"caler",),
    "autocast": (b"autocast",),
    "autocast_dtypes": (b"autocast",),
    "half": (b"float16", b"half", b"fp16", b"16-mixed", b"16-true", b"caler"),
    "bf16": (b"bf16", b"bfloat16"),
    "ddp": (b"DistributedDataParallel", b"DDP", b"init_process_group"),
    "fsdp1": (b"FullyShardedDataParallel", b"FSDP"),
    "fsdp2": (b"fully_shard",),
    "deepspeed": (b"deepspeed",),
    "optimizer": (b"opt", b"Opt"),
    "optimizers": (b"optim",),
    "backward": (b"backward",),
    "clip": (b"clip_grad",),
    "initializes": (b"parameters(",),
    "trainer": (b"rainer", b"TrainingArg", b"Config", b"ccelerat", b"ightning", b"Fabric", b"deepspeed"),
    "all_reduce": (b"reduce", b"gather", b"broadcast"),
    "all_reduce_loss": (b"reduce", b"gather", b"broadcast"),
}

_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "reduce",
    "gather",
    "broadcast",
    "all_reduce_multigpu",
    "gather_for_metrics",
    "reduce_tensor",
    "reduce_loss",
    "all_reduce_mean",
)
_CLIPS = ("clip_grad_norm_", "clip_grad_norm", "clip_grad_value_", "clip_grads_with_norm_")
_TRAINERS = {
    "transformers": ("Trainer", "Seq2SeqTrainer", "TrainingArguments", "Seq2SeqTrainingArguments"),
    "trl": ("SFTTrainer", "DPOTrainer", "PPOTrainer", "GRPOTrainer", "SFTConfig", "RewardTrainer"),
    "accelerate": ("Accelerator",),
    "lightning": ("LightningModule", "Fabric", "seed_everything", "LightningDataModule"),
    "deepspeed": ("initialize",),
}


def scaler_like(name: str) -> bool:
    """Whether a name is that of a gradient scaler.

    >>> [scaler_like(n) for n in ("scaler", "self.grad_scaler", "StandardScaler", "loss")]
    [True, True, False, False]
    """
    last = name.rpartition(".")[2].lower()
    return last in ("scaler", "_scaler", "amp_scaler", "loss_scaler") or "gradscaler" in last.replace("_", "")


def optimizer_like(name: str) -> bool:
    last = name.rpartition(".")[2].lower().lstrip("_")
    return (
        last in ("opt", "optim") or "optimizer" in last or last.startswith(("opt_", "optim_")) or last.endswith("_opt")
    )


def facts_of(module: Module) -> FileFacts:
    """All facts of one file."""
    return FileFacts(**{name: _fact(module, name) for name in _FACTS})


def lazy_facts(module: Module) -> FileFacts:
    """The facts of one file, each worked out when a rule asks for it."""
    return cast(FileFacts, _Lazy(lambda name: _fact(module, name)))


def joined_facts(look: Callable[[str], Any]) -> ProjectFacts:
    """Facts that come from elsewhere, each looked up when a rule asks for it."""
    return cast(ProjectFacts, _Lazy(look))


class _Lazy:
    def __init__(self, look: Callable[[str], Any]) -> None:
        self._look = look

    def __getattr__(self, name: str) -> Any:
        if name not in _FACTS:
            raise AttributeError(f"there is no fact {name!r}")
        value = self._look(name)
        setattr(self, name, value)
        return value


def _fact(module: Module, name: str) -> Any:
    there = any(word in module.text for word in _HINTS[name])
    return _FACTS[name](module) if there else getattr(NOTHING, name)


def _initializes(module: Module) -> bool:
    """``for p in self.parameters(): p.data.uniform_(…)``"""
    for loop in module.nodes(ast.For):
        listed = {
            c.func.attr for c in ast.walk(loop.iter) if isinstance(c, ast.Call) and isinstance(c.func, ast.Attribute)
        }
        calls = (
            [c for c in ast.walk(loop) if isinstance(c, ast.Call)]
            if listed & {"parameters", "named_parameters"}
            else []
        )
        made = {c.func.attr for c in calls if isinstance(c.func, ast.Attribute)} - _HARMLESS
        if any(name.endswith("_") and not name.startswith(("all_", "add", "copy", "clamp", "lerp")) for name in made):
            return True
    return False


def _scales(module: Module) -> bool:
    return any(scaler_like(module.receiver(c)) for c in module.calls("scale"))


def _attributes(module: Module) -> set[str]:
    return {a.attr for a in module.nodes(ast.Attribute)}


def _said(module: Module, *words: str) -> bool:
    """Whether one of these words is a string of its own, or an argument that is set to True."""
    strings = (c.value for c in module.nodes(ast.Constant) if isinstance(c.value, str))
    switches = (k.arg for k in module.nodes(ast.keyword) if k.arg and _is_true(k.value))
    return any(word in words for found in (strings, switches) for word in found)


def _half(module: Module) -> bool:
    dtypes = _dtypes(module)
    if {"float16", "half"} & _attributes(module) or "float16" in dtypes:
        return True
    return _said(module, "fp16", "float16", "16-mixed", "16-true") or (_scales(module) and "bfloat16" not in dtypes)


def _dtypes(module: Module) -> frozenset[str]:
    return frozenset(_autocast_dtype(module, c) for c in module.calls("autocast"))


def _optimizers(module: Module) -> frozenset[str]:
    made = ((name, calls) for name, calls in module.calls_by_name.items() if name[:1].isupper())
    return frozenset(name for name, calls in made if any(module.called(c).startswith("torch.optim.") for c in calls))


_SCALERS = ("GradScaler", "ShardedGradScaler", "NativeScaler", "NativeScalerWithGradNormCount")
_FACTS: dict[str, Callable[[Module], Any]] = {
    "torch": lambda m: True,
    "scaler": lambda m: bool(m.calls(*_SCALERS)) or _scales(m),
    "unscale": lambda m: bool(m.calls("unscale_")),
    "scaler_step": lambda m: any(scaler_like(m.receiver(c)) for c in m.calls("step")),
    "scaler_update": lambda m: any(scaler_like(m.receiver(c)) for c in m.calls("update")),
    "autocast": lambda m: bool(m.calls("autocast")) or "autocast" in _attributes(m),
    "autocast_dtypes": _dtypes,
    "half": _half,
    "bf16": lambda m: "bfloat16" in _attributes(m) or _said(m, "bf16", "bfloat16", "bf16-mixed"),
    "ddp": lambda m: bool(m.calls("DistributedDataParallel", "DDP", "init_process_group")),
    "fsdp1": lambda m: bool(m.calls("FullyShardedDataParallel", "FSDP")),
    "fsdp2": lambda m: bool(m.calls("fully_shard")),
    "deepspeed": lambda m: any(m.called(c).startswith("deepspeed.") for c in m.calls("initialize")),
    "optimizer": lambda m: (
        any(optimizer_like(m.receiver(c)) for c in m.calls("step", "zero_grad")) or bool(_optimizers(m))
    ),
    "optimizers": _optimizers,
    "backward": lambda m: bool(m.calls("backward", "manual_backward")),
    "clip": lambda m: bool(m.calls(*_CLIPS)),
    "initializes": _initializes,
    "trainer": lambda m: frozenset(who for who, names in _TRAINERS.items() if _uses_trainer(m, who, names)),
    "all_reduce": lambda m: bool(m.calls(*_COLLECTIVES)),
    "all_reduce_loss": lambda m: any(_about_loss(m.source(a)) for c in m.calls(*_COLLECTIVES) for a in c.args),
}
_HINTS = {name: tuple(word.decode() for word in words) for name, words in HINTS.items()}
NOTHING = FileFacts()


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _uses_trainer(module: Module, who: str, names: Iterable[str]) -> bool:
    wanted = {"lightning": ("lightning", "pytorch_lightning")}.get(who, (who,))
    return any(
        meaning.partition(".")[0] in wanted and (meaning.rpartition(".")[2] in names or meaning in wanted)
        for meaning in module.aliases.values()
    )


def _about_loss(text: str) -> bool:
    low = text.lower()
    return any(word in low for word in ("loss", "nan", "inf", "finite", "bad", "skip", "found", "flag", "valid"))


def _autocast_dtype(module: Module, call: ast.Call) -> str:
    given: Any = next((k.value for k in call.keywords if k.arg == "dtype"), None)
    if given is None:
        plain = [a for a in call.args if isinstance(a, ast.Attribute)]
        given = plain[0] if plain else None
    if given is None:
        device = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "device_type"), None)
        on_cpu = isinstance(device, ast.Constant) and device.value == "cpu"
        return "bfloat16" if on_cpu or module.called(call).startswith("torch.cpu.") else "default"
    name = module.called(given).rpartition(".")[2]
    return {"half": "float16"}.get(name, name) if name in ("float16", "half", "bfloat16", "float32") else "unknown"

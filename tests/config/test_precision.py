"""The precision table: what is in force over all sources, against torch, accelerate and the trainers themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from nanproof.config import Project, load, precision
from nanproof.config.code import Code
from nanproof.config.hardware import find_hardware
from nanproof.config.memory import WAYS, bytes_of
from nanproof.config.precision_table import PrecisionTable

LOOP = """
import torch
from accelerate import Accelerator
from torch.cuda.amp import autocast
class Trainer:
    def __init__(self, model, amp=False, fp16=False, lr=1e-4):
        self.accelerator = Accelerator(mixed_precision='fp16' if fp16 else 'no')
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr)
    def train(self):
        with autocast(enabled=self.amp):
            loss = self.model(batch)
        self.accelerator.backward(loss)
"""
ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: NO\nmixed_precision: {}\n"
TRAINER = "import torch\nfrom transformers import AutoModel, TrainingArguments\n"


def table(folder: Path, hardware: str | None = None, parameters: int | None = None, **files: str) -> PrecisionTable:
    paths = []
    for name, text in files.items():
        paths.append(folder / name.replace("__", "."))
        paths[-1].write_text(text)
    return precision(load(*paths), hardware, parameters)


def test_the_alignment_that_was_none(tmp_path: Path) -> None:
    """System B: amp reaches autocast, whose default is fp16, without a scaler; accelerate's bf16 has no say."""
    found = table(
        tmp_path,
        "A100",
        200_000_000,
        c__yaml="trainer:\n  amp: True\n  fp16: False\n  lr: 5.0e-5\n",
        a__yaml=ACCELERATE.format("bf16"),
        t__py=LOOP,
    )
    place = {n: tmp_path / n for n in ("t.py", "a.yaml", "c.yaml")}
    assert found.verdict == (
        f"amp: True reaches autocast at {place['t.py']}:10, whose default on cuda is float16, and no GradScaler was "
        f"found; bf16 of {place['a.yaml']}:3 is overridden there"
    )
    assert (found.compute, found.weights, found.states, found.scaler, found.sure, found.ok) == (
        "float16",
        "float32",
        "float32",
        False,
        True,
        False,
    )
    rows = {(r.what, r.setting): (r.dtype, r.where, r.effective) for r in found.rows}
    assert rows["autocast", "dtype"] == ("float16", f"{place['t.py']}:10", True)
    assert rows["Accelerator", "mixed_precision"] == ("float32", f"{place['t.py']}:7", False)
    assert rows["accelerate", "mixed_precision"] == ("bfloat16", f"{place['a.yaml']}:3", False)
    assert rows["compute", ""][0] == "float16"
    ways = {w.name: w for w in found.ways}
    assert ways["fp32"].change == -2 * 200_000_000
    assert "dtype=torch.bfloat16" in ways["bf16"].how
    assert "312 Tflop/s" in ways["bf16"].speed


def test_double_fp16(tmp_path: Path) -> None:
    """System C: weights in fp16 under fp16=True."""
    text = (
        TRAINER
        + "m = AutoModel.from_pretrained('m', torch_dtype=torch.float16)\n"
        + "TrainingArguments('o', fp16=True, learning_rate=1e-4)\n"
    )
    found = table(tmp_path, "V100", t__py=text)
    assert (found.compute, found.weights, found.states, found.ok) == ("float16", "float16", "float16", False)
    assert "no fp32 master copy" in found.verdict
    assert [w.possible for w in found.ways] == [False, True, True]
    lora = table(
        tmp_path, "V100", t__py=text + "from peft import get_peft_model\nm = get_peft_model(m, LoraConfig())\n"
    )
    assert (lora.ok, lora.states) == (True, "float32")
    assert any("activations above 65504 overflow" in n for n in lora.notes)


@pytest.mark.parametrize(
    ("files", "compute", "words"),
    [
        ({"c__yaml": "per_device_train_batch_size: 1\nbf16: true\nlearning_rate: 1.0e-4\n"}, "bfloat16", "consistent"),
        ({"c__yaml": "per_device_train_batch_size: 1\nbf16: on\nfp16: on\n"}, "float16", "fp16 and bf16 .* both on"),
        (
            {
                "c__yaml": "per_device_train_batch_size: 1\nbf16: true\n",
                "d__json": '{"fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}',
            },
            "float16",
            "bf16 is on .* DeepSpeed has fp16.enabled on",
        ),
        (
            {
                "c__yaml": "per_device_train_batch_size: 1\nbf16: true\n",
                "d__json": '{"fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}',
            },
            "bfloat16",
            "consistent",
        ),
        (
            {"t__py": TRAINER + "TrainingArguments('o', fp16=True)\n", "a__yaml": ACCELERATE.format("bf16")},
            "float16",
            "mixed_precision: bf16 is overridden by TrainingArguments.fp16",
        ),
        ({"t__py": f"{TRAINER}TrainingArguments('o')\n", "a__yaml": ACCELERATE.format("bf16")}, "bfloat16", "consist"),
        ({"c__yaml": "trainer: {precision: 16-mixed, max_epochs: 3}\n"}, "float16", "with a loss scaler"),
        ({"c__yaml": "trainer: {precision: 16-true}\nmodel: {lr: 1.0e-3}\n"}, "float16", "no fp32 master copy"),
        ({"c__yaml": "trainer: {precision: bf16-mixed}\n"}, "bfloat16", "consistent"),
        ({"c__yaml": "trainer: {precision: 32}\n"}, "float32", "consistent"),
        ({"c__yaml": "lr: 1.0e-4\n"}, "float32", "consistent: weights float32, computing in float32 throughout"),
        (
            {"t__py": "import torch\ntorch.amp.GradScaler()\nwith torch.autocast('cuda', dtype=torch.half): pass\n"},
            "float16",
            "with a loss scaler",
        ),
        ({"t__py": "import torch\nwith torch.autocast('cpu'): pass\n"}, "bfloat16", "consistent"),
        ({"t__py": "import torch\nwith torch.autocast('cuda', enabled=x): pass\n"}, "float32", "as far as"),
    ],
)
def test_what_is_in_force(tmp_path: Path, files: dict[str, str], compute: str, words: str) -> None:
    found = table(tmp_path, **files)
    assert found.compute == compute
    assert re.search(words, found.verdict), found.verdict


def test_fsdp_and_default_dtype(tmp_path: Path) -> None:
    fsdp = "import torch\nMixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)\n"
    assert table(tmp_path, t__py=fsdp).compute == "bfloat16"
    text = "import torch\ntorch.set_default_dtype(torch.float16)\ntorch.optim.AdamW(p, lr=1e-4)\n"
    assert table(tmp_path, t__py=text).weights == "float16"
    assert not table(tmp_path, t__py=TRAINER + "TrainingArguments(**given)\n").sure


def test_the_defaults_of_autocast_are_torchs() -> None:
    assert torch.get_autocast_dtype("cuda") == torch.float16
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16


@pytest.mark.parametrize(("flags", "launcher"), [("fp16=True", "bf16"), ("", "bf16"), ("bf16=True", "no")])
def test_the_flag_of_the_trainer_beats_accelerate(
    flags: str, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule that the table follows, asked of the real trainer: flags win over what accelerate launch sets."""
    from transformers import TrainingArguments

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    given = {flags.removesuffix("=True"): True} if flags else {}
    real = TrainingArguments(str(tmp_path), use_cpu=True, **given)
    text = TRAINER + f"TrainingArguments('o'{', ' + flags if flags else ''})\n"
    found = table(tmp_path, t__py=text, a__yaml=ACCELERATE.format(launcher))
    short = {"float16": "fp16", "bfloat16": "bf16", "float32": "no"}
    assert short[found.compute] == real.mixed_precision


@pytest.mark.parametrize("scaled", [False, True])
def test_memory_is_what_torch_takes(scaled: bool) -> None:
    dtype = torch.bfloat16 if scaled else torch.float32
    model = torch.nn.Linear(64, 32, dtype=dtype)
    frozen = torch.nn.Linear(16, 16, dtype=dtype).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64, dtype=dtype)).sum().backward()
    optimizer.step()
    held = [*model.parameters(), *frozen.parameters(), *(p.grad for p in model.parameters())]
    held += [t for s in optimizer.state.values() for k, t in s.items() if k != "step"]
    taken = sum(t.numel() * t.element_size() for t in held if t is not None)
    trained, all_ = 64 * 32 + 32, 64 * 32 + 32 + 16 * 16 + 16
    assert bytes_of(WAYS["bf16 weights" if scaled else "fp32"], all_, trained) == taken


@pytest.mark.parametrize("lr", [1e-5, 1e-4, 3e-4, 1e-2])
def test_the_magnitude_where_bf16_loses_a_step(lr: float, tmp_path: Path) -> None:
    text = f"import torch\nmodel = build().to(torch.bfloat16)\nopt = torch.optim.AdamW(model.parameters(), lr={lr})\n"
    [note] = [n for n in table(tmp_path, t__py=text).notes if "is lost" in n]
    limit = float(note.split("magnitude ")[1].split(" ")[0])
    weight = torch.tensor(2.0 ** round(torch.tensor(limit).log2().item()), dtype=torch.bfloat16)
    assert weight + lr == weight
    assert weight / 2 + lr != weight / 2


@pytest.mark.parametrize(
    ("words", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", True),
        ("Tesla V100-SXM2-32GB", False),
        ("Tesla T4", False),
        ("H100 PCIe", True),
        ("NVIDIA GeForce RTX 3090", True),
        ("RTX 4090", True),
        ("GeForce RTX 2080 Ti", False),
        ("GTX 1660 Ti", False),
        ("GeForce GTX 1080 Ti", False),
        ("Tesla P100", False),
        ("AMD Instinct MI250X", True),
        ("MI300X", True),
        ("MI50", False),
        ("sm_80", True),
        ("sm_75", False),
        ("8.6", True),
        ("cpu", True),
        ("L40S", True),
        ("A10G", True),
        ("8 x A100 80GB", True),
        ("64 nodes x 4 V100 32GB", False),
        ("RTX A6000", True),
        ("Quadro RTX 6000", False),
    ],
)
def test_hardware(words: str, bf16: bool) -> None:
    found = find_hardware(words)
    assert found is not None
    assert found.bf16 is bf16


def test_hardware_that_nobody_knows() -> None:
    assert find_hardware("") is None
    assert find_hardware("a toaster") is None


def test_bf16_where_there_is_none(tmp_path: Path) -> None:
    found = table(tmp_path, "Tesla T4", c__yaml="per_device_train_batch_size: 1\nbf16: true\n")
    assert found.verdict.startswith("bf16 asks for bfloat16, which T4, RTX 20xx")
    assert table(tmp_path, "RTX 3090", c__yaml="per_device_train_batch_size: 1\nbf16: true\n").ok


def test_code_beside_the_settings(tmp_path: Path) -> None:
    """The code may come as a project of its own, as lint has it."""
    (tmp_path / "c.yaml").write_text("trainer: {amp: true, lr: 1.0e-4}\n")
    project = Project(codes=(Code.parse("t.py", LOOP),))
    found = precision(load(tmp_path / "c.yaml"), project=project)
    assert "no GradScaler was found" in found.verdict
    scaler = Project(codes=(Code.parse("t.py", LOOP), Code.parse("s.py", "from timm.utils import NativeScaler\n")))
    assert precision(load(tmp_path / "c.yaml"), project=scaler).scaler is None


@pytest.mark.parametrize(("amp", "compute"), [("true", "float16"), ("false", "bfloat16")])
def test_an_autocast_behind_a_condition(tmp_path: Path, amp: str, compute: str) -> None:
    """``autocast(…) if amp else nullcontext()``, with the default of another device by its name."""
    code = """
import torch
from accelerate import Accelerator
from contextlib import nullcontext
DEFAULT = torch.get_autocast_dtype("cuda")
class Model(torch.nn.Module):
    def forward(self, x):
        with torch.autocast(x.device.type, dtype=DEFAULT) if self.amp else nullcontext():
            return self.inner(x)
accelerator = Accelerator(mixed_precision="fp16" if cfg.fp16 else str(told.mixed_precision))
"""
    config = f"training: {{amp: {amp}, fp16: false, lr: 1.0e-4}}\n"
    found = table(tmp_path, c__yaml=config, a__yaml=ACCELERATE.format("bf16"), t__py=code)
    assert (found.compute, found.sure, found.ok) == (compute, True, amp == "false")
    assert ("amp: true reaches autocast" in found.verdict) is (amp == "true")


def test_a_flag_that_only_code_explains_leaves_it_open(tmp_path: Path) -> None:
    config = "training: {amp: true, lr: 1.0e-4}\n"
    assert not table(tmp_path, c__yaml=config, a__yaml=ACCELERATE.format("bf16")).sure
    assert table(tmp_path, c__yaml=config.replace("true", "false"), a__yaml=ACCELERATE.format("bf16")).sure


def test_a_dtype_by_the_name_that_the_config_gives(tmp_path: Path) -> None:
    code = (
        TRAINER + "m = AutoModel.from_pretrained('x', dtype=getattr(torch, cfg.load_dtype))\na = TrainingArguments()\n"
    )
    assert table(tmp_path, c__yaml="load_dtype: float16\nlearning_rate: 1.0e-4\n", t__py=code).weights == "float16"

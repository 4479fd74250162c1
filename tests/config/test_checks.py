"""The checks NP701 to NP710: each fires on what it is for, and stays silent on configs that are right."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from config.clean import CLEAN
from nanproof.config import Project, check_config, load
from nanproof.config.check import check_settings, checks
from nanproof.config.code import Code
from nanproof.records import Finding
from nanproof.topics import Topic


def codes(found: tuple[Finding, ...]) -> list[tuple[str, int]]:
    return [(f.code, f.line) for f in found]


def found_in(folder: Path, text: str, code: str = "", name: str = "c.yaml", **facts: object) -> tuple[Finding, ...]:
    (folder / name).write_text(text)
    project = Project(codes=(Code.parse("train.py", code),) if code else (), facts=facts)
    return check_config([folder / name], project)


def test_all_checks_are_there() -> None:
    assert [c.code for c in checks()] == [f"NP7{i:02d}" for i in range(1, 11)]
    assert len({c.name for c in checks()}) == 10


@pytest.mark.parametrize("check", checks(), ids=lambda c: c.code)
def test_the_examples_of_its_page(check: object, tmp_path: Path) -> None:
    """On the bad example exactly this check fires, on the good one nothing does."""
    from nanproof.config.check import Check

    assert isinstance(check, Check)
    project = Project(codes=(Code.parse("t.py", check.beside),) if check.beside else (), facts=check.facts or {})
    for kind, expected in ((check.bad, [check.code]), (check.good, [])):
        path = tmp_path / "c.yaml"
        path.write_text(kind)
        assert [f.code for f in check_settings(load(path), project)] == expected
        assert yaml.safe_load(kind)
    assert isinstance(check.topic, Topic)
    page = check.topic.markdown()
    assert check.bad.strip() in page
    assert f"# noqa: {check.code}" in page


@pytest.mark.parametrize("name", CLEAN)
def test_clean_configs_are_clean(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(CLEAN[name])
    project = Project.read(path) if name.endswith(".py") else Project()
    assert check_config([path], project) == ()


LOADER = "import yaml\ncfg = yaml.safe_load(open('c.yaml'))\nmodel(cfg['lr'] * 2, cfg['epochs'], cfg['seed'])\n"
NOISE = """import yaml
cfg = yaml.safe_load(open('c.yaml'))['train']
for _ in range(cfg['epochs']):
    x = x * cfg['noise']
"""


@pytest.mark.parametrize("word", ["1e-4", "1E5", "1.5e4", "2.e4", "3e+4", "-1e-4"])
def test_np708_is_what_pyyaml_does(word: str, tmp_path: Path) -> None:
    text = f"train:\n  noise: {word}  # note\n  epochs: 3\n"
    assert isinstance(yaml.safe_load(text)["train"]["noise"], str)
    [finding] = found_in(tmp_path, text, NOISE)
    assert (finding.code, finding.line, finding.column, finding.safe) == ("NP708", 2, 10, True)
    [edit] = finding.edits
    fixed = (text.encode()[: edit.start] + edit.text.encode() + text.encode()[edit.end :]).decode()
    assert yaml.safe_load(fixed)["train"]["noise"] == float(word)
    assert OmegaConf.create(fixed).train.noise == OmegaConf.create(text).train.noise
    assert fixed.replace(edit.text, word) == text
    assert found_in(tmp_path, fixed, NOISE) == ()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("lr: 1.0e-4\nepochs: 1\n", ""),
        ("lr: '1e-4'\nepochs: 1\n", ""),
        ("lr: 1e-4\nname: ${lr}\n", ""),
        ("lr: 1e-4\nepochs: 1\n", "from omegaconf import OmegaConf\ncfg = OmegaConf.load('c.yaml')\n"),
        ("lr: 1e-4\nepochs: 1\n", LOADER.replace("cfg['lr']", "float(cfg['lr'])")),
        (
            "lr: 1e-4\nepochs: 1\n",
            "import yaml\np.add_argument('--lr', type=float)\np.set_defaults(**yaml.safe_load(f))\n",
        ),
        ("lr: 1e-4\nepochs: 1\n", "class C(pydantic.BaseModel): pass\nyaml.safe_load(f)\n"),
        ("lr: 0.1\ncommit_hash: 12e3\n", ""),
        ("lr: 1e-4\nepochs: 1\n", "print('no config is read here')\n"),
    ],
)
def test_np708_is_silent(text: str, code: str, tmp_path: Path) -> None:
    assert found_in(tmp_path, text, code) == ()


def test_np708_with_the_code_that_reads_it(tmp_path: Path) -> None:
    assert codes(found_in(tmp_path, "lr: 1e-4\nepochs: 1\nseed: 0\n", LOADER)) == [("NP708", 1)]


@pytest.mark.parametrize(
    ("text", "fires"),
    [
        ("optimizer: AdamW\nlr: 0.5\nepochs: 1\n", True),
        ("optimizer: AdamW\nlr: 0.5\nscheduler: noam\n", False),
        ("optimizer: AdamW\nlr: 2.0\nsched: {name: NoamAnnealing}\n", False),
        ("optimizer: AdamW\nlr: 2.0\nscheduler: cosine\nwarmup_steps: 100\n", True),
        ("optimizer: AdamW\nlr: 1.0e-12\n", True),
        ("optimizer: sgd\nlr: 5\n", False),
        ("lr: 1.0\nepochs: 1\n", False),
        ("optimizer: sgd\nlr: -0.1\n", True),
        ("optimizer: sgd\nlr: .nan\n", True),
        ("per_device_train_batch_size: 1\nlearning_rate: 0.1\n", True),
        ("per_device_train_batch_size: 1\nlearning_rate: 0.1\noptim: adafactor\n", False),
    ],
)
def test_np703(text: str, fires: bool, tmp_path: Path) -> None:
    assert [f.code for f in found_in(tmp_path, text)] == ["NP703"] * fires


AMP = """
import torch
class T:
    def step(self):
        with torch.cuda.amp.autocast(enabled=self.use_amp):
            loss = self.net(x)
        loss.backward()
"""


@pytest.mark.parametrize(
    ("code", "fires"),
    [
        (AMP, True),
        (AMP + "scaler = torch.cuda.amp.GradScaler()\n", False),
        (AMP + "from timm.utils import NativeScaler\n", False),
        (AMP + "from sklearn.preprocessing import StandardScaler\n", True),
        (AMP.replace("enabled=self.use_amp", "enabled=self.use_amp, dtype=torch.bfloat16"), False),
        (AMP.replace("enabled=self.use_amp", "enabled=self.use_amp, dtype=self.dtype"), False),
        (AMP.replace("enabled=self.use_amp", "enabled=self.other"), False),
        ("", False),
    ],
)
def test_np701_follows_the_flag_into_the_code(code: str, fires: bool, tmp_path: Path) -> None:
    assert codes(found_in(tmp_path, "lr: 1.0e-4\nuse_amp: true\n", code)) == [("NP701", 2)] * fires


def test_np701_over_several_files(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: NO\nmixed_precision: bf16\n"
    )
    (tmp_path / "c.yaml").write_text("learning_rate: 1.0e-4\nfp16: true\nper_device_train_batch_size: 1\n")
    [finding] = check_config([tmp_path / "a.yaml", tmp_path / "c.yaml"])
    assert (finding.code, Path(finding.path).name, finding.line) == ("NP701", "a.yaml", 3)
    assert (
        finding.message
        == f"mixed_precision: bf16 is overridden by fp16 at {tmp_path / 'c.yaml'}:2: training computes in float16"
    )
    (tmp_path / "b.yaml").write_text((tmp_path / "a.yaml").read_text())  # two of them: nobody knows which one is used
    assert check_config(sorted(tmp_path.glob("*.yaml"))) == ()


def test_np701_and_the_gpu(tmp_path: Path) -> None:
    text = "bf16: true\nper_device_train_batch_size: 1\n"
    assert codes(found_in(tmp_path, text, gpu="Tesla V100")) == [("NP701", 1)]
    assert found_in(tmp_path, text, gpu="A100") == ()


def test_np702_leaves_lora_and_quantised_models_alone(tmp_path: Path) -> None:
    text = "torch_dtype: float16\nfp16: true\nlearning_rate: 1.0e-4\nper_device_train_batch_size: 1\n"
    assert codes(found_in(tmp_path, text)) == [("NP702", 1)]
    for more in ("lora_r: 8\n", "load_in_4bit: true\n", "finetuning_type: lora\n"):
        assert found_in(tmp_path, text + more) == ()
    assert codes(found_in(tmp_path, text + "finetuning_type: full\n")) == [("NP702", 1)]


@pytest.mark.parametrize(
    ("text", "code", "lines"),
    [
        ("lr: 1.0e-4\ngrad_clip: 100\n", "", [2]),
        ("lr: 1.0e-4\ngrad_clip: 40\n", "", []),
        ("lr: 1.0e-4\ngrad_clip: 0\n", "", []),
        ("lr: 1.0e-4\ngrad_clip: -1\n", "", [2]),
        ("lr: 1.0e-4\ngrad_clip: 1.0\n", "lim = cfg.grad_clip\nloss.backward()\nopt.step()\n", [2]),
        ("lr: 1.0e-4\ngrad_clip: 1.0\n", "torch.nn.utils.clip_grad_norm_(p, cfg.grad_clip)\nloss.backward()\n", []),
        ("lr: 1.0e-4\ngrad_clip: 1.0\n", "Trainer(gradient_clip_val=cfg.grad_clip)\nloss.backward()\n", []),
    ],
)
def test_np705(text: str, code: str, lines: list[int], tmp_path: Path) -> None:
    assert codes(found_in(tmp_path, text, code)) == [("NP705", n) for n in lines]


def test_np705_between_trainer_and_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text('{"zero_optimization": {"stage": 2},\n "gradient_clipping": 0.1}')
    (tmp_path / "c.yaml").write_text("max_grad_norm: 1.0\nper_device_train_batch_size: 1\nlearning_rate: 1.0e-4\n")
    assert codes(check_settings(load(tmp_path / "d.json", tmp_path / "c.yaml"))) == [("NP705", 2)]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ('{"fp16": {"enabled": true,\n"loss_scale": 1}}', [2]),
        ('{"fp16": {"enabled": true,\n"loss_scale": 131072}}', [2]),
        ('{"fp16": {"enabled": true,\n"loss_scale": 128}}', []),
        ('{"fp16": {"enabled": false,\n"loss_scale": 1}}', []),
        ('{"fp16": {"enabled": true,\n"initial_scale_power": 40}}', [2]),
        ('{"fp16": {"enabled": true,\n"initial_scale_power": 32}}', [2]),
        ('{"fp16": {"enabled": true,\n"initial_scale_power": 16}}', []),
        ('{"bf16": {"enabled": true,\n"loss_scale": 0}}', [2]),
        ('{"fp16": {"enabled": true,\n"loss_scale_window": 2}}', [2]),
    ],
)
def test_np707(text: str, lines: list[int], tmp_path: Path) -> None:
    assert codes(found_in(tmp_path, text, name="ds.json")) == [("NP707", n) for n in lines]


def test_np709_in_pure_half_precision(tmp_path: Path) -> None:
    text = "torch_dtype: float16\nlearning_rate: 1.0e-4\nadam_epsilon: 1.0e-8\nper_device_train_batch_size: 1\n"
    assert codes(found_in(tmp_path, text)) == [("NP702", 1), ("NP709", 3)]
    assert codes(found_in(tmp_path, text.replace("1.0e-8", "1.0e-4"))) == [("NP702", 1)]
    assert found_in(tmp_path, text.replace("float16", "float32")) == ()
    assert codes(found_in(tmp_path, "optimizer: {name: adam, eps: 0.0, lr: 0.001}\n")) == [("NP709", 1)]


READER = """
import yaml
def main():
    cfg = yaml.safe_load(open("c.yaml"))
    fit(cfg["lr"], cfg["epochs"], cfg["batch_size"], cfg.get("train", {})["seed"])
"""
DEAD = "lr: 0.1\nepochs: 1\nbatch_size: 2\ntrain: {seed: 1}\ngradient_accumulation_steps: 2\nlatent_loss_weight: 0.1\n"


@pytest.mark.parametrize(
    ("code", "lines"),
    [
        (READER, [5, 6]),
        (READER + "x = cfg.gradient_accumulation_steps\n", [6]),
        (READER + "x = getattr(cfg, 'latent_loss_weight')\n", [5]),
        (READER + "def f(gradient_accumulation_steps=1, latent_loss_weight=0): pass\n", []),
        (READER + "Model(**cfg)\n", []),
        (READER + "for key in cfg: print(key)\n", []),
        (READER + "import lib\nlib.train(cfg)\n", []),
        (READER + "import wandb\nwandb.init(config=cfg)\n", [5, 6]),
        (READER + "getattr(cfg, name)\n", []),
        ("print('another program')\n", []),
        ("", []),
    ],
)
def test_np710(code: str, lines: list[int], tmp_path: Path) -> None:
    assert codes(found_in(tmp_path, DEAD, code)) == [("NP710", n) for n in lines]


def test_findings_in_code(tmp_path: Path) -> None:
    script = tmp_path / "sft.py"
    script.write_text(
        "from transformers import TrainingArguments\n\nlr = 3.0\n"
        "args = TrainingArguments(\n    'out', learning_rate=0.5,\n    max_grad_norm=500.0,\n)\n"
    )
    assert codes(check_config([], Project.read(tmp_path))) == [("NP703", 5), ("NP705", 6)]
    module = tmp_path / "my_config.py"
    module.write_text("class Optim:\n    optimizer = 'adam'\n    lr = 1.0\n")
    assert codes(check_config([], Project.read(module))) == [("NP703", 3)]


def test_rubbish_is_passed_over(tmp_path: Path) -> None:
    for name, data in {"a.yaml": b"\xff", "b.json": b"{", "c.toml": b"=", "d.yaml": b"- 1"}.items():
        (tmp_path / name).write_bytes(data)
    assert check_config([*tmp_path.iterdir(), tmp_path / "missing.yaml", tmp_path]) == ()


def test_np710_is_silent_when_code_was_not_seen(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(DEAD)
    (tmp_path / "train.py").write_text(READER)
    assert codes(check_config([tmp_path / "c.yaml"], Project.read(tmp_path))) == [("NP710", 5), ("NP710", 6)]
    (tmp_path / "old.py").write_text("print cfg['gradient_accumulation_steps']\n")  # Python 2: it may still be run
    assert codes(check_config([tmp_path / "c.yaml"], Project.read(tmp_path))) == [("NP710", 6)]
    seen = Project.read(tmp_path)
    assert check_config([tmp_path / "c.yaml"], Project(codes=seen.codes, complete=False)) == ()


def test_the_groups_of_a_hydra_config(tmp_path: Path) -> None:
    """Files below a config with a defaults list are read by OmegaConf; a value that two configs share counts once."""
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim/adam.yaml").write_text("name: adam\nlr: 9e-1\n")
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text("defaults:\n  - optim: adam\n  - _self_\nepochs: 1\n")
    found = check_config(sorted(tmp_path.rglob("*.yaml")))
    assert [(f.code, Path(f.path).name, f.line) for f in found] == [("NP703", "adam.yaml", 2)]


HALF = """
import torch
from transformers import AutoModel, TrainingArguments
m = AutoModel.from_pretrained("x", torch_dtype=torch.float16)
a = TrainingArguments("o", learning_rate=1e-4)
"""


def test_another_program_of_the_project_is_not_this_one(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("learning_rate: 1.0e-4\nadam_epsilon: 1.0e-8\nmax_steps: 5\n")
    one = Project(codes=(Code.parse("a.py", HALF),))
    two = Project(codes=(Code.parse("a.py", HALF), Code.parse("b.py", "import torch\ntorch.optim.SGD(p, 0.1)\n")))
    assert "NP709" in [f.code for f in check_config([tmp_path / "c.yaml"], one)]
    assert "NP709" not in [f.code for f in check_config([tmp_path / "c.yaml"], two)]
    (tmp_path / "a.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: NO\nmixed_precision: bf16\n"
    )
    accelerator = "from accelerate import Accelerator\nAccelerator(mixed_precision={!r})\n"
    alone = Project(codes=(Code.parse("a.py", accelerator.format("fp16")),))
    several = Project(codes=(*alone.codes, Code.parse("b.py", accelerator.format("no"))))
    assert codes(check_config([tmp_path / "a.yaml"], alone)) == [("NP701", 3)]
    assert check_config([tmp_path / "a.yaml"], several) == ()

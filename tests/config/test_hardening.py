"""Hardening: changes on evidence only, marks for what does nothing, the ladder, and taking it all back."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import yaml

from nanproof.config import Project, harden, load
from nanproof.config.code import Code
from nanproof.config.evidence import Fact
from nanproof.config.hardening import Hardening, undo
from nanproof.errors import FormatError, UsageError

CONFIG = """\
# latent to text
optimizer:
  name: adamw
  lr: 1.0e-4          # peak
  min_lr: 1.0e-5
  grad_clip_norm: 1.0
training:
  warmup_steps: 1000
  max_steps: 500000
  save_every: 5000
  accumulation_steps: 1   # for stability
  resume_from: step_95000.pt
"""
CODE = """
import torch, yaml
def main(cfg):
    opt = torch.optim.AdamW(net.parameters(), lr=cfg["optimizer"]["lr"])
    sched(cfg["optimizer"]["min_lr"], cfg["training"]["warmup_steps"], cfg["training"]["max_steps"])
    net(x).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), cfg["optimizer"]["grad_clip_norm"])
    save(cfg["training"]["save_every"], cfg["training"]["resume_from"], cfg["optimizer"]["name"])
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "train.py").write_text(CODE)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path / "config.yaml"


def changes(found: Hardening) -> dict[str, tuple[object, object]]:
    return {c.key: (c.before, c.after) for c in found.changes}


def left(found: Hardening) -> dict[str, str]:
    return {item.what: item.mark for item in found.left}


def test_without_evidence_nothing_changes(config: Path) -> None:
    found = harden(config)
    assert found.changes == ()
    assert found.diff == ""
    assert left(found) == {"training.accumulation_steps": "dead"}
    assert found.after == CONFIG


def test_the_classic_ladder(config: Path) -> None:
    """System A: half the rate, twice the warm-up, more checkpoints; the dead and the inert are named."""
    found = harden(config, conservative=True)
    assert changes(found) == {
        "optimizer.lr": (1e-4, 5e-5),
        "optimizer.min_lr": (1e-5, 5e-6),
        "training.warmup_steps": (1000, 2000),
        "training.save_every": (5000, 2500),
    }
    assert left(found) == {"optimizer.grad_clip_norm": "low value", "training.accumulation_steps": "dead"}
    assert "  lr: 5.0e-5          # peak\n" in found.after
    assert yaml.safe_load(found.after)["optimizer"]["lr"] == 5e-5


@pytest.mark.parametrize(("level", "lr"), [(1, 3e-5), (2, 1e-5), (5, 1e-5)])
def test_escalation(config: Path, level: int, lr: float) -> None:
    found = harden(config, escalate=level, facts={"last_healthy": "step_90000.pt"})
    assert changes(found)["optimizer.lr"] == (1e-4, lr)
    assert any("scan the data" in step for step in found.next) == (level >= 3)
    assert ("training.resume_from" in changes(found)) is True
    with pytest.raises(UsageError, match="there is no level 6"):
        harden(config, escalate=6)


def test_fp32_is_the_last_resort(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("per_device_train_batch_size: 1\nbf16: true\nlearning_rate: 1.0e-4\n")
    assert "bf16" not in changes(harden(path, escalate=3))
    assert changes(harden(path, escalate=4))["bf16"] == (True, False)


def test_wishes_are_carried_out_and_marked(config: Path) -> None:
    """System A's own advice: two of its four changes do nothing, and are said to."""
    found = harden(
        config,
        set=[
            "lr=5e-5",
            "grad_clip_norm=0.5",
            "training.warmup_steps=2000",
            "accumulation_steps=2",
            "training.ema=0.99",
        ],
    )
    assert {c.key: c.mark for c in found.changes} == {
        "optimizer.lr": "",
        "optimizer.grad_clip_norm": "low value",
        "training.warmup_steps": "",
        "training.accumulation_steps": "dead",
        "training.ema": "dead",
    }
    assert yaml.safe_load(found.after)["training"]["accumulation_steps"] == 2
    clip = next(c for c in found.changes if c.mark == "low value")
    assert "Adam divides the scale out" in clip.remark


def test_what_low_value_means() -> None:
    """The claim behind the mark: under Adam, clipping at 0.5 or 1.0 gives the same weights when both always bind."""

    def train(limit: float) -> torch.Tensor:
        torch.manual_seed(0)
        net = torch.nn.Linear(8, 8)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        for _ in range(200):
            optimizer.zero_grad()
            (1e3 * (net(torch.randn(4, 8)) - 5).square().mean()).backward()
            assert torch.nn.utils.clip_grad_norm_(net.parameters(), limit) > 1.0  # binds for both limits
            optimizer.step()
        return net.weight.detach()

    moved = (train(1.0) - torch.nn.Linear(8, 8).weight).abs().max()
    assert (train(0.5) - train(1.0)).abs().max() < 1e-4 * moved


def test_keys_that_are_not_clear(config: Path) -> None:
    config.write_text("a: {lr: 1.0e-4}\nb: {lr: 1.0e-4}\n")
    with pytest.raises(UsageError, match=r"lr may mean a\.lr, b\.lr"):
        harden(config, set=["lr=1"])
    for word in ("lr", "~a.lr", "a={lr:1}"):
        with pytest.raises(UsageError, match="not"):
            harden(config, set=[word])
    with pytest.raises(UsageError, match="is not a fact that hardening knows"):
        harden(config, facts={"mood": "bad"})


def test_min_lr_above_the_new_rate(config: Path) -> None:
    """System B: lr 5e-5 → 1e-5 needs min_lr lowered with it."""
    found = harden(config, set=["lr=1e-5"])
    assert "min_lr" in left(found)
    assert "min_lr" not in left(harden(config, set=["lr=1e-5", "min_lr=1e-6"]))


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"cause": "lr-too-high"}, {"optimizer.lr": (1e-4, 5e-5), "optimizer.min_lr": (1e-5, 5e-6)}),
        ({"cause": "warmup"}, {"training.warmup_steps": (1000, 2000)}),
        ({"cause": "bad-data"}, {}),
        (
            {"nan_step": 92_261, "last_healthy_step": 90_000, "last_healthy": "step_90000.pt"},
            {"training.save_every": (5000, 565), "training.resume_from": ("step_95000.pt", "step_90000.pt")},
        ),
        ({"grad_norm": 0.8, "grad_norm_peak": 50}, {}),  # it is clipped already
    ],
)
def test_each_fact_has_its_remedy(
    config: Path, facts: dict[str, object], expected: dict[str, tuple[object, object]]
) -> None:
    known = [Fact(name=k, value=v, source="train.log:7") for k, v in facts.items()]  # type: ignore[arg-type]
    found = harden(config, facts=known)
    assert changes(found) == expected
    assert all(any("train.log:7" in e for e in c.evidence) for c in found.changes if c.key != "optimizer.min_lr")


def test_a_rate_far_beyond_its_optimizer_is_not_only_halved(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nopt = torch.optim.SGD(model.parameters(), lr=1e9)\n")
    found = harden(script, facts={"cause": "lr-too-high"})
    assert changes(found) == {"SGD.lr": (1e9, 0.11)}


def test_code_is_looked_through_once_for_all_facts() -> None:
    project = Project(codes=(Code.parse("train.py", "step(cfg.grad_clip)\n"),))
    told = project.with_facts({"gpu": "V100"}).with_facts({"cause": "warmup"})
    assert told.facts == {"gpu": "V100", "cause": "warmup"}
    assert told.reads is project.reads
    assert told.calls is project.calls
    assert "lr" in told.with_codes([Code.parse("more.py", "use(cfg.lr)\n")]).reads.mentioned


def test_a_rate_that_the_checkpoint_overrides(config: Path) -> None:
    """System D: the config says 1e-4 already; changing it does nothing as long as the scheduler is restored."""
    facts = [Fact(name="checkpoint_lr", value=4.92e-4, source="epoch_28.pth")]
    found = harden(config, facts=facts)
    assert found.changes == ()
    [why] = [item.why for item in found.left if item.what == "optimizer.lr"]
    assert "the config already says 0.0001, but 0.000492 is in force (epoch_28.pth)" in why
    [change] = harden(config, set={"lr": 5e-5}, facts=facts).changes
    assert (change.mark, change.remark.startswith("the checkpoint restores 0.000492")) == ("inert", True)


def test_precision_by_evidence(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("per_device_train_batch_size: 1\nfp16: true  # fast\nlearning_rate: 1.0e-4\n")
    cause = {"cause": "fp16-overflow"}
    assert left(harden(path, facts=cause)) == {"precision": ""}  # which way is right depends on the GPU
    ampere = harden(path, facts={**cause, "gpu": "A100"})
    assert changes(ampere) == {"fp16": (True, False), "bf16": (None, True)}
    assert "fp16: false  # fast\n" in ampere.after
    volta = harden(path, facts={**cause, "gpu": "V100", "parameters": 10**9})
    assert changes(volta) == {"fp16": (True, False)}
    assert "16.0 GB" in volta.changes[0].why
    assert harden(path, facts={"gpu": "A100"}).changes == ()


def test_frozen_weights_go_with_the_format_that_is_computed_in(tmp_path: Path) -> None:
    """Under LoRA half-precision weights are fine, but they compute, and float16 is too narrow for that."""
    path = tmp_path / "c.yaml"
    path.write_text("load_dtype: float16\nlora_r: 8\nfp16: true\nbf16: false\nlearning_rate: 1.0e-4\n")
    cause = {"cause": "fp16-overflow"}
    both = {"fp16": (True, False), "bf16": (False, True)}
    assert changes(harden(path, facts={**cause, "gpu": "A100"})) == {"load_dtype": ("float16", "bfloat16"), **both}
    volta = harden(path, facts={**cause, "gpu": "V100"})
    assert changes(volta) == {"load_dtype": ("float16", "float32"), "fp16": (True, False)}


def test_amp_that_reaches_autocast_without_scaler(tmp_path: Path) -> None:
    """System B: the config can only switch it off; what to do in the code is said with it."""
    path = tmp_path / "c.yaml"
    path.write_text("trainer:\n  amp: True\n  lr: 5.0e-5\n")
    code = "import torch\nwith torch.autocast('cuda', enabled=self.amp): pass\n"
    found = harden(path, project=Project(codes=(Code.parse("t.py", code),)))
    assert changes(found) == {"trainer.amp": (True, False)}
    assert "until autocast at t.py:2 names dtype=torch.bfloat16" in found.changes[0].why
    assert found.after == "trainer:\n  amp: False\n  lr: 5.0e-5\n"


def test_double_fp16_in_a_script(tmp_path: Path) -> None:
    """System C: the script itself is the config."""
    path = tmp_path / "sft.py"
    path.write_text(
        "import torch\nfrom transformers import AutoModel, TrainingArguments\n"
        "m = AutoModel.from_pretrained('m', torch_dtype=torch.float16)\n"
        "a = TrainingArguments('out', fp16=True, learning_rate=2e-4)\n"
    )
    found = harden(path, facts={"gpu": "A100", "cause": "double-fp16", "nan_hidden": True})
    assert "torch_dtype=torch.float32)" in found.after
    assert "fp16=False, learning_rate=2e-4, bf16=True, logging_nan_inf_filter=False)" in found.after
    ast.parse(found.after)
    marks = {c.key: c.mark for c in found.changes}
    assert marks["TrainingArguments.logging_nan_inf_filter"] == "inert"
    assert found.beside == tmp_path / "sft_stable.py"


def test_findings_become_changes(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("optimizer: {name: adamw, lr: 1.0, eps: 1.0e-20}\nepochs: 1e1\nmax_grad_norm: 5000\n")
    found = harden(path)
    assert changes(found) == {
        "optimizer.lr": (1.0, 1e-3),
        "optimizer.eps": (1e-20, 1e-8),
        "max_grad_norm": (5000, 1.0),
        "epochs": ("1e1", 10.0),
    }
    assert yaml.safe_load(found.after)["epochs"] == 10.0
    assert {c.key: c.evidence[0][:5] for c in found.changes} == {
        "optimizer.lr": "NP703",
        "optimizer.eps": "NP709",
        "max_grad_norm": "NP705",
        "epochs": "NP708",
    }


def test_a_launch_script_that_has_the_last_word(config: Path) -> None:
    (config.parent / "run.sh").write_text("torchrun train.py --config config.yaml \\\n  optimizer.lr=5e-4\n")
    [change] = harden(config, set=["lr=5e-5"]).changes
    assert (change.before, change.after, change.mark) == (1e-4, 5e-5, "inert")
    assert change.remark.endswith("run.sh:2 overrides it with 0.0005")


@pytest.mark.parametrize(("wish", "key", "line"), [("LR=1e-4", "lr", "LR=0.0001"), ("clip-grad=1", "clip_grad", "")])
def test_variables_and_spellings_of_a_launch_script(tmp_path: Path, wish: str, key: str, line: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text("LR=1e-3\npython train.py --lr $LR --clip-grad 0.0\n")
    found = harden(path, set=[wish])
    assert [(c.key, c.before is not None) for c in found.changes] == [(key, True)]
    first, second = found.after.splitlines()
    assert first == (line or "LR=1e-3")
    assert second == f"python train.py --lr $LR --clip-grad {'0.0' if line else '1'}"


def test_a_key_that_names_the_dtype_needs_no_flag_of_another_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch, yaml\n"
        'cfg = yaml.safe_load(open("cfg.yaml"))\n'
        'dtype = getattr(torch, cfg["amp_dtype"])\n'
        'scaler = torch.amp.GradScaler("cuda")\n'
        "for x in loader:\n"
        '    with torch.autocast("cuda", dtype=dtype):\n'
        "        loss = model(x)\n"
        "    scaler.scale(loss).backward()\n"
        "    scaler.step(opt)\n"
    )
    (tmp_path / "other.py").write_text(
        "from transformers import TrainingArguments\nargs = TrainingArguments(output_dir='o', fp16=True)\n"
    )
    path = tmp_path / "cfg.yaml"
    path.write_text("amp_dtype: float16\nlr: 3.0e-4\n")
    found = harden(path, facts={"cause": "fp16-overflow", "gpu": "A100"})
    assert changes(found) == {"amp_dtype": ("float16", "bfloat16")}


def test_values_of_other_files(tmp_path: Path) -> None:
    """A Hydra config is hardened in its main file, when that has the last word."""
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim/adam.yaml").write_text("name: adam\nlr: 1e-3\n")
    main = tmp_path / "main.yaml"
    main.write_text("defaults:\n  - optim: adam\n  - _self_\nseed: 1\n")
    found = harden(main, set=["lr=1e-4"])
    assert found.after == "defaults:\n  - optim: adam\n  - _self_\nseed: 1\noptim:\n  lr: 0.0001\n"
    found.save()
    assert load(tmp_path, name="main_stable")["optim.lr"].value == 1e-4
    main.write_text("defaults:\n  - _self_\n  - optim: adam\nseed: 1\n")
    with pytest.raises(UsageError, match="the defaults list puts that after this file"):
        harden(main, set=["lr=1e-4"])


def test_beside_in_place_and_back(config: Path) -> None:
    found = harden(config, set=["lr=5e-5"])
    out = found.save()
    assert (out.name, out.read_text(), config.read_text()) == ("config_stable.yaml", found.after, CONFIG)
    assert undo(config) == (out,)
    assert not out.exists()
    harden(config, set=["lr=5e-5"]).apply()
    harden(config, set=["lr=2e-5"]).apply()
    assert load(config)["optimizer.lr"].value == 2e-5
    undo(config)
    assert load(config)["optimizer.lr"].value == 5e-5
    undo(config)
    assert config.read_bytes() == CONFIG.encode()
    with pytest.raises(UsageError, match="is left to undo"):
        undo(config)


def test_an_edit_in_between_is_not_lost(config: Path) -> None:
    harden(config, set=["lr=5e-5"]).apply()
    config.write_text(config.read_text() + "# mine\n")
    with pytest.raises(UsageError, match="was edited since"):
        undo(config)
    assert config.read_text().endswith("# mine\n")


def test_the_original_is_no_target(config: Path) -> None:
    with pytest.raises(UsageError, match="is the original"):
        harden(config, set=["lr=1"]).save(config)
    with pytest.raises(UsageError, match="does not exist"):
        harden(config, set=["lr=1"]).save(config.parent / "no/where.yaml")


def test_what_is_no_config(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("- 1\n")
    with pytest.raises(FormatError, match="not a mapping"):
        harden(tmp_path / "c.yaml")


def test_what_is_so_already(tmp_path: Path) -> None:
    """System D's config.py: it says 1e-4; setting it again changes nothing, and that is said."""
    path = tmp_path / "config.py"
    path.write_text("class Config:\n    lr = 1e-4  # peak\n    n_streams = 4\n    batch_size = 64\n")
    found = harden(path, set=["lr=1e-4"])
    assert found.changes == ()
    assert [(item.what, item.why) for item in found.left] == [("Config.lr", f"it is 0.0001 already ({path}:2)")]
    staged = harden(path, set=["n_streams=2", "batch_size=48", "lr=1.5e-4"])
    assert staged.after == "class Config:\n    lr = 1.5e-4  # peak\n    n_streams = 2\n    batch_size = 48\n"


@pytest.mark.parametrize(
    ("name", "text", "wish", "told"),
    [
        ("c.yaml", "train:\n  lr: 0.01\n", "learning_rate=1e-4", r"it sets train\.lr .*c\.yaml:2"),
        ("c.toml", "[train]\nlr = 0.01\n", "optimizer.params.lr=1e-4", r"it sets train\.lr"),
        ("c.py", "lr = 0.01\n", "fp16.enabled=false", "no one place for fp16.enabled"),
        ("ds.json", '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}\n', "lr=1e-4", "reads no key"),
        ("run.sh", "python train.py --fp16 --lr 1\n", "fp16.enabled=false", "it sets fp16"),
    ],
)
def test_a_wish_that_nobody_would_read_is_refused(tmp_path: Path, name: str, text: str, wish: str, told: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageError, match=told):
        harden(path, set=[wish])


@pytest.mark.parametrize("parser", ["argparse", "HfArgumentParser"])
def test_a_launch_script_gets_no_flag_that_the_program_refuses(tmp_path: Path, parser: str) -> None:
    tmp_path.joinpath("train.py").write_text(
        f"import {parser}\np.add_argument('--fp16', action='store_true')\np.add_argument('--lr', type=float)\n"
        "p.add_argument('--per_device_train_batch_size', type=int)\np.add_argument('--output_dir')\n"
    )
    path = tmp_path / "run.sh"
    path.write_text("accelerate launch train.py --fp16 --lr 1e-4 --per_device_train_batch_size 2 --output_dir out\n")
    found = harden(path, facts={"cause": "fp16-overflow", "gpu": "A100"})
    assert ("--bf16" in found.after) == (parser == "HfArgumentParser")
    assert "--fp16" not in found.after

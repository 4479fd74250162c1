"""Whatever is imported before torch, the bad step is skipped: many libraries look for torch without importing it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from run.launch import SCRIPTS, nanproof

pytestmark = pytest.mark.slow

PACKAGES = (
    "numpy",
    "scipy",
    "pandas",
    "matplotlib",
    "seaborn",
    "PIL",
    "cv2",
    "skimage",
    "sklearn",
    "xgboost",
    "lightgbm",
    "tqdm",
    "einops",
    "transformers",
    "datasets",
    "tokenizers",
    "accelerate",
    "peft",
    "trl",
    "evaluate",
    "diffusers",
    "timm",
    "torchvision",
    "sentence_transformers",
    "safetensors",
    "huggingface_hub",
    "bitsandbytes",
    "open_clip",
    "lightning",
    "pytorch_lightning",
    "torchmetrics",
    "ignite",
    "skorch",
    "fastai",
    "wandb",
    "tensorboard",
    "hydra",
    "omegaconf",
    "optuna",
    "ray",
    "keras",
    "jax",
    "numba",
    "kornia",
    "monai",
    "segmentation_models_pytorch",
    "gymnasium",
    "stable_baselines3",
    "torch_geometric",
    "gpytorch",
    "pyro",
    "nltk",
    "tiktoken",
    "sentencepiece",
    "webdataset",
    "onnx",
    "onnxruntime",
    "schedulefree",
)
"""What training scripts import most; `make loops` tries those that are installed, one process each."""
LOOKING = ("datasets", "peft")
"""Look for torch by themselves, each in its own way; peft brings transformers. Lightning: tests/run/test_scripts.py."""


OURS = ("nanproof.guard.guard", "nanproof.guard.auto_locate", "nanproof.locating", "nanproof.integrations.transformers")
"""Each imports torch while it is being imported itself, or a module that does; sorted imports have it first."""


@pytest.mark.parametrize("package", OURS)
def test_nanproof_itself_imported_before_torch(package: str, tmp_path: Path) -> None:
    if package.startswith("nanproof.integrations.") and importlib.util.find_spec(package.rpartition(".")[2]) is None:
        pytest.skip("the trainer is not installed")
    done = nanproof("run", "--run-dir", tmp_path / "run", SCRIPTS / "import_first.py", package)
    assert done.stdout == "finite\n"
    assert "3 steps, 2 updates, 1 skipped" in done.stderr


@pytest.mark.parametrize("package", LOOKING)
def test_a_package_that_is_imported_before_torch(package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    done = nanproof("run", "--run-dir", tmp_path / "run", SCRIPTS / "import_first.py", package)
    assert done.stdout.endswith("finite\n")
    assert "not finite" not in done.stdout
    assert "nanproof: guarding AdamW (2 tensors, 5 parameters) of Linear" in done.stderr
    assert "3 steps, 2 updates, 1 skipped" in done.stderr

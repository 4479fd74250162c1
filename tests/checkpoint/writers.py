"""Checkpoints of every format, written by the libraries that write them in real life."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from support.ranks import on_ranks

NAN, INF = float("nan"), float("inf")


def small_model() -> nn.Module:
    """A convolution, a BatchNorm and a linear layer, the same every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def trained(steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A model with its AdamW and OneCycle schedule after some steps."""
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=100)
    for _ in range(steps):
        model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model, optimizer, schedule


def training_state(steps: int = 3, **more: Any) -> dict[str, Any]:
    """What a hand-written training loop saves."""
    model, optimizer, schedule = trained(steps)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict()}
    return state | {"step": steps} | more


def series(folder: Path, healths: str) -> Path:
    """``step_0.pt`` and so on: one letter each, h(ealthy), b(uffer NaN), p(arameter NaN) or d(amaged)."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, letter in enumerate(healths):
        state = training_state(1, step=1)
        if letter == "b":
            state["model"]["1.running_mean"][2] = NAN
        elif letter == "p":
            for value in state["model"].values():
                if value.is_floating_point():
                    value.fill_(NAN)
        path = folder / f"step_{i}.pt"
        torch.save(state, path)
        if letter == "d":
            os.truncate(path, path.stat().st_size // 2)
    return folder


def hf_trainer(folder: Path, **arguments: Any) -> Path:
    """checkpoint-2 and checkpoint-4, written by transformers.Trainer."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    data = [{"input_ids": torch.randint(3, 32, (8,)), "labels": torch.randint(3, 32, (8,))} for _ in range(16)]
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        learning_rate=1e-4,
        warmup_steps=1,
        disable_tqdm=True,
        logging_steps=1,
        dataloader_pin_memory=False,
        **arguments,
    )
    Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=data).train()
    return folder


def lightning_ckpt(folder: Path) -> Path:
    """A checkpoint written by Lightning's Trainer, with EarlyStopping, whose best score is Inf at first."""
    pytest.importorskip("lightning")
    import lightning as L
    from lightning.pytorch.callbacks import EarlyStopping

    class Module(L.LightningModule):
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Linear(4, width)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=2e-4)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 10)]

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=4)
    trainer = L.Trainer(
        max_epochs=1,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        enable_checkpointing=False,
        callbacks=[EarlyStopping("never", check_on_train_epoch_end=False)],
    )
    trainer.fit(Module(), data)
    path = folder / "epoch=0-step=4.ckpt"
    trainer.save_checkpoint(path)
    return path


def accelerate_state(folder: Path) -> Path:
    """A folder written by accelerate's save_state."""
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, schedule = trained()
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.save_state(str(folder))
    return folder


def dcp_folder(folder: Path, *, bad: bool = False) -> Path:
    """A DCP folder written under FSDP2 by two ranks; ``bad`` puts a NaN into rank 1's shard."""
    on_ranks(_write_dcp, str(folder), bad)
    return folder


def _write_dcp(rank: int, folder: str, bad: bool) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(2):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if bad and rank == 1:
        with torch.no_grad():
            model[0].weight.to_local()[1, 2] = float("nan")
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state, "step": 2}, checkpoint_id=folder)


def deepspeed_folder(folder: Path) -> Path:
    """The layout of DeepSpeed ZeRO, made by hand with torch.save: DeepSpeed itself does not install here."""
    step = folder / "global_step4"
    step.mkdir(parents=True)
    model, _, _ = trained()
    torch.save(
        {"module": model.state_dict(), "global_steps": 4, "ds_version": "0.15"}, step / "mp_rank_00_model_states.pt"
    )
    for rank in range(2):
        flat = {"exp_avg": torch.randn(50) * 0.01, "exp_avg_sq": torch.rand(50) * 0.01, "step": 4}
        inner = {"state": {0: flat}, "param_groups": [{"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}]}
        state = {
            "optimizer_state_dict": {
                "loss_scaler": None,
                "zero_stage": 2,
                "base_optimizer_state": inner,
                "single_partition_of_fp32_groups": [torch.randn(50)],
            }
        }
        torch.save(state, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    (folder / "latest").write_text("global_step4")
    return folder


def sharded_safetensors(folder: Path) -> Path:
    """Two shards with their index, written by transformers' save_pretrained."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="60KB")
    return folder


def gguf_file(path: Path, *, bad: bool = False) -> Path:
    """Plain and quantized tensors, written by the gguf package; ``bad`` makes one scale of a block NaN."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "d"])
    rng = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", rng.standard_normal((4, 64)).astype(np.float32))
    writer.add_tensor("half.weight", rng.standard_normal((4, 32)).astype(np.float16))
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q5_1):
        packed = gguf.quantize(rng.standard_normal((4, 64)).astype(np.float32), kind)
        if bad and kind == gguf.GGMLQuantizationType.Q4_0:
            packed[1, 0:2] = (0x00, 0x7E)
        writer.add_tensor(f"{kind.name}.weight", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

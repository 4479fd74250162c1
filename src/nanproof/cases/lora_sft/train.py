"""Train the miniature of the LoRA fine-tuning, with the Trainer of transformers and PEFT.

python -m nanproof.cases.lora_sft.train --config-name original --seed 0
python -m nanproof.cases.lora_sft.train --config-name stable model.load_dtype=float32 training.bf16=false
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from ...errors import UsageError
from ..program import Job, run_program
from ..recording import Recorder, Score, keep_code
from ..settings import Settings, load
from . import base, task

FOLDER = Path(__file__).parent
DTYPES = ("float16", "bfloat16", "float32")
QUESTIONS = 100


class Largest:
    """The largest input of the first down projection since it was last asked: a massive activation."""

    def __init__(self, model: Any) -> None:
        self._value = torch.zeros(())
        model.model.layers[0].mlp.down_proj.register_forward_pre_hook(self._look)

    def _look(self, _: Any, inputs: tuple[torch.Tensor]) -> None:
        self._value = torch.maximum(self._value, inputs[0].detach().float().abs().max().cpu())

    def take(self) -> float:
        found, self._value = self._value.item(), torch.zeros(())
        return found


def load_model(cfg: Settings, folder: Path) -> Any:
    """The base model, loaded in the format that the config asks for, with adapters."""
    from transformers import LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, cfg.model.load_dtype))
    return add_adapters(model, cfg)


def add_adapters(model: Any, cfg: Settings) -> Any:
    """LoRA on the attention, as in its paper; PEFT makes the adapters float32 by default."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        r=cfg.lora.r,
        lora_alpha=cfg.lora.alpha,
        lora_dropout=0.0,
    )
    return get_peft_model(model, lora, autocast_adapter_dtype=cfg.lora.float32_adapters)


def make_trainer(job: Job, tokenizer: Any, recorder: Recorder) -> Any:
    """The model as it is loaded, its adapters, and the Trainer, told its precision by three switches of the config."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    cfg = job.cfg
    folder = base.find_base(job.out.parent, tokenizer, cfg)
    torch.manual_seed(job.seed)
    tuned = load_model(cfg, folder)
    largest = Largest(tuned.base_model.model)

    class Record(TrainerCallback):  # type: ignore[misc]
        """Writes the Trainer's own log lines down, as they are: the Trainer logs a NaN loss as 0."""

        def on_step_end(self, args: Any, state: Any, control: Any, **told: Any) -> None:
            if state.global_step >= job.steps:  # before the schedule is over, if asked for
                control.should_training_stop = control.should_save = True

        def on_log(self, args: Any, state: Any, control: Any, **told: Any) -> None:
            logs = told["logs"]
            if "loss" in logs:
                recorder.step(
                    state.global_step,
                    loss=float(logs["loss"]),
                    grad_norm=float(logs["grad_norm"]),
                    lr=float(logs["learning_rate"]),
                    activation=largest.take(),
                    skipped=trainer.accelerator.optimizer_step_was_skipped,
                )

    source = random.Random(job.seed)
    questions = [task.draw_question(source) for _ in range(1024)]
    arguments = TrainingArguments(
        output_dir=str(job.out / "checkpoints"),
        max_steps=cfg.training.steps,
        seed=job.seed,
        use_cpu=job.device.type == "cpu",
        fp16=cfg.training.fp16,
        bf16=cfg.training.bf16,
        per_device_train_batch_size=cfg.training.batch_size,
        max_grad_norm=cfg.training.grad_clip_norm,
        learning_rate=cfg.optimizer.lr,
        lr_scheduler_type="linear",
        warmup_steps=cfg.optimizer.warmup_steps,
        optim=cfg.optimizer.name,
        gradient_checkpointing=cfg.training.gradient_checkpointing,
        logging_steps=1,
        save_steps=cfg.training.save_every,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        label_names=["labels"],
    )
    trainer = Trainer(
        model=tuned,
        args=arguments,
        callbacks=[Record()],
        train_dataset=[task.encode(tokenizer, q, q.tagged) for q in questions],
        data_collator=lambda examples: task.collate(tokenizer, examples),
    )
    if cfg.training.fp16 and job.device.type == "cpu":
        train_in_float16(trainer.accelerator)
    return trainer


def train_in_float16(accelerator: Any) -> None:
    """What accelerate does for fp16 on a GPU, and leaves out on a CPU: autocast, and a loss scaler."""
    accelerator.state._mixed_precision = "fp16"
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu")


def train(job: Job) -> None:
    """Fine-tune, then let the model answer questions that it has not seen."""
    try:
        import peft  # noqa: F401
        from transformers.trainer_callback import PrinterCallback
    except ImportError:
        raise UsageError("lora-sft trains with transformers and peft", hint="pip install 'nanproof[hf]' peft") from None
    if job.cfg.model.load_dtype not in DTYPES:
        raise UsageError(f"weights are not loaded in {job.cfg.model.load_dtype}", hint=f"one of {', '.join(DTYPES)}")
    if job.cfg.training.fp16 and job.cfg.training.bf16:
        raise UsageError("fp16 and bf16 are both on", hint="switch one of them off: training.fp16=false")
    tokenizer, recorder = task.make_tokenizer(), Recorder(job)
    keep_code(job, FOLDER)
    trainer = make_trainer(job, tokenizer, recorder)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=find_checkpoint(job))
    recorder.finish(trainer.model, evaluate(trainer.model, tokenizer, job))


def find_checkpoint(job: Job) -> str | None:
    """The Trainer's checkpoint to go on from: the given one, or the last of a run's folder."""
    from transformers.trainer_utils import get_last_checkpoint

    if job.resume is None:
        return None
    if (job.resume / "trainer_state.json").is_file():
        return str(job.resume)
    for folder in (job.resume, job.resume / "checkpoints"):
        if folder.is_dir() and (found := get_last_checkpoint(str(folder))):
            return str(found)
    raise UsageError(f"{job.resume} holds no checkpoint", hint="give a run's folder, or one checkpoint-N of it")


def compute_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def make_step(batch: Any) -> tuple[Any, Any]:
    """For ``nanproof locate INCIDENT --step …:make_step``: the original's step; the incident brings its weights."""
    cfg = load(FOLDER / "configs", "original")
    return add_adapters(base.make_model(task.make_tokenizer()).half(), cfg), compute_loss


def smoke_original() -> tuple[Any, Any, torch.optim.Optimizer]:
    """For ``nanproof smoke nanproof.cases.lora_sft.train:smoke_original``."""
    return _smoke("original")


def smoke_stable() -> tuple[Any, Any, torch.optim.Optimizer]:
    """For ``nanproof smoke nanproof.cases.lora_sft.train:smoke_stable``."""
    return _smoke("stable")


def _smoke(name: str) -> tuple[Any, Any, torch.optim.Optimizer]:
    cfg, tokenizer, source = load(FOLDER / "configs", name), task.make_tokenizer(), random.Random(0)
    folder = base.find_base(Path("runs"), tokenizer, cfg)
    torch.manual_seed(0)
    model = load_model(cfg, folder)
    drawn = [task.draw_question(source) for _ in range(cfg.training.batch_size)]
    batch = task.collate(tokenizer, [task.encode(tokenizer, q, q.tagged) for q in drawn])
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, lambda: compute_loss(model, batch), torch.optim.AdamW(trained, lr=cfg.optimizer.lr)


def evaluate(model: Any, tokenizer: Any, job: Job) -> Score:
    """By generation: how many answers are well-formed (answer rate), and how many are right (accuracy)."""
    rate, right = ask(model, tokenizer, job.device)
    if job.ranks.first:
        print(f"answer rate {rate:.2f}, accuracy {right:.2f}", flush=True)
    return Score(metric="answer accuracy", value=right, chance=0.0, target=0.8, questions=QUESTIONS)


@torch.no_grad()
def ask(model: Any, tokenizer: Any, device: torch.device) -> tuple[float, float]:
    """Questions that it has not seen: the shares of answers that are well-formed, and right."""
    source = random.Random(10_000)
    questions = [task.draw_question(source) for _ in range(QUESTIONS)]
    model.eval()
    asked = tokenizer([q.text for q in questions], return_tensors="pt", padding=True).to(device)
    said = model.generate(**asked, max_new_tokens=26, do_sample=False)
    answers = [task.answer_of(s) for s in tokenizer.batch_decode(said[:, asked["input_ids"].shape[1] :])]
    rate = sum(a is not None for a in answers) / QUESTIONS
    return rate, sum(a == q.number for a, q in zip(answers, questions, strict=True)) / QUESTIONS


if __name__ == "__main__":
    run_program("lora-sft", FOLDER, train)

"""One training loop for each row of docs/engines.md, as its users write it: nothing here knows of nanproof.

python scripts/engines_loops.py ddp        # on several ranks: torchrun --nproc-per-node 2 scripts/engines_loops.py ddp
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path
from typing import Any

import engines_data as data
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

SETTINGS = sys.argv[2:]


def start() -> int:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()


def plain_loop(model: nn.Module, optimizer: Any, rank: int) -> None:
    for x, y in data.batches(rank):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def ddp() -> None:
    rank = start()
    options = {name: True for name in SETTINGS if name != "nested"}
    model: nn.Module = nn.parallel.DistributedDataParallel(data.make_model(norm=True, drop=True), **options)
    model = nn.Sequential(model) if "nested" in SETTINGS else model
    torch.manual_seed(rank)
    plain_loop(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rank)
    data.report(model.state_dict())


def no_sync() -> None:
    rank = start()
    model = nn.parallel.DistributedDataParallel(data.make_model(norm=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for x, y in data.batches(rank):
        optimizer.zero_grad()
        with model.no_sync():
            (cross_entropy(model(x[:2]), y[:2]) / 2).backward()
        (cross_entropy(model(x[2:]), y[2:]) / 2).backward()
        optimizer.step()
    data.report(model.state_dict())


def sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    rank = start()
    model, seed = data.make_model(), rank
    if "hsdp" in SETTINGS:
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif "tp" in SETTINGS:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        seed = mesh["dp"].get_local_rank()
    else:
        fully_shard(model)
    plain_loop(model, torch.optim.AdamW(model.parameters(), lr=1e-2), seed)
    data.report(model.state_dict())


def pipeline() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

    rank = start()
    torch.manual_seed(0)
    parts = [
        nn.Sequential(nn.Linear(8, 16), nn.ReLU()),
        nn.Sequential(nn.Linear(16, 16), nn.ReLU()),
        nn.Sequential(nn.Linear(16, 16), nn.ReLU()),
        nn.Linear(16, 2),
    ]
    if "interleaved" in SETTINGS:
        mine = [parts[rank], parts[rank + 2]]
        stages = [PipelineStage(p, rank + 2 * i, 4, torch.device("cpu")) for i, p in enumerate(mine)]
        schedule: Any = ScheduleInterleaved1F1B(stages, n_microbatches=2, loss_fn=cross_entropy)
    else:
        mine = [nn.Sequential(*parts[2 * rank : 2 * rank + 2])]
        schedule = Schedule1F1B(PipelineStage(mine[0], rank, 2, torch.device("cpu")), 2, loss_fn=cross_entropy)
    model = nn.ModuleList(mine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    turn = [0]
    bad = data.mode == "bad"
    if rank == 1 and bad:  # the gradient of one stage alone: nothing that the stages exchange carries it
        next(model[-1].parameters()).register_hook(lambda g: g * float("nan") if turn[0] == data.BAD else g)
    for i, (x, y) in enumerate(data.batches(1, guilty=-1)):
        turn[0] = i
        optimizer.zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])
        optimizer.step()
    data.report(model.state_dict())


def titan() -> None:
    """As torchtitan trains: FSDP2 per block, accumulated micro-batches, the norm of DTensors, a schedule per step."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    rank = start()
    model = data.make_model()
    for block in model:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    for x, y in data.batches(rank):
        optimizer.zero_grad()
        losses = []
        for i in (0, 2):
            loss = cross_entropy(model(x[i : i + 2]), y[i : i + 2]) / 2
            loss.backward()
            losses.append(loss.detach())
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        optimizer.step()
        schedule.step()
        total = torch.sum(torch.stack(losses))
        dist.all_reduce(total)  # the loss that it logs
    data.report({**model.state_dict(), "lr": torch.tensor(schedule.get_last_lr())})


def tune() -> None:
    """As a torchtune recipe trains: losses are sums over tokens, gradients are divided by those of all ranks."""
    from torch.distributed.fsdp import fully_shard

    rank = start()
    model = data.make_model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    optimizer.zero_grad(set_to_none=True)
    for x, y in data.batches(rank):
        tokens = torch.tensor(0)
        for i, size in ((0, 1), (1, 3)):
            tokens += size
            (cross_entropy(model(x[i : i + size]), y[i : i + size]) * size).backward()
        dist.all_reduce(tokens)
        for p in model.parameters():
            if p.grad is not None:
                p.grad *= dist.get_world_size() / tokens
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
    data.report({**model.state_dict(), "lr": torch.tensor(schedule.get_last_lr())})


def fabric() -> None:
    from lightning.fabric import Fabric

    strategy: Any = SETTINGS[0]
    if strategy == "fsdp2":
        from lightning.fabric.strategies import ModelParallelStrategy
        from torch.distributed.fsdp import fully_shard

        strategy = ModelParallelStrategy(
            lambda m, mesh: fully_shard(m, mesh=mesh["data_parallel"]), data_parallel_size=2, tensor_parallel_size=1
        )
    launched = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    launched.launch()
    model = data.make_model(norm=strategy == "ddp")
    if strategy == "ddp":
        model, optimizer = launched.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    else:
        model = launched.setup(model)
        optimizer = launched.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for x, y in data.batches(launched.global_rank):
        optimizer.zero_grad()
        launched.backward(cross_entropy(model(x), y))
        if strategy == "ddp":
            launched.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
    data.report(model.state_dict())


def lightning() -> None:
    import lightning as L

    sharded = SETTINGS[0] == "fsdp2"

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = data.make_model(norm=not sharded)

        def configure_model(self) -> None:
            if sharded and self.device_mesh is not None:
                from torch.distributed.fsdp import fully_shard

                fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, _: int) -> Any:
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    strategy: Any = "ddp"
    if sharded:
        from lightning.pytorch.strategies import ModelParallelStrategy

        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    module = Module()
    rows = data.Samples(2)
    dealt = torch.utils.data.DistributedSampler(rows, num_replicas=2, rank=int(os.environ["RANK"]), shuffle=False)
    loader = torch.utils.data.DataLoader(rows, batch_size=data.SIZE, sampler=dealt)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=None if sharded else 1.0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
    )
    trainer.fit(module, loader)
    data.report(module.state_dict())


def accelerate() -> None:
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin

    options: dict[str, Any] = {}
    if "fsdp2" in SETTINGS:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    elif "deepspeed" in SETTINGS:
        _no_shared_memory_op()
        options["deepspeed_plugin"] = DeepSpeedPlugin(zero_stage=1, gradient_accumulation_steps=1)
        options["mixed_precision"] = "bf16"
    accelerator = Accelerator(cpu=True, **options)
    model = data.make_model(norm=not options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(data.Samples(1), batch_size=data.SIZE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for x, y in data.batches(accelerator.process_index):
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(x).float(), y))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    data.report(accelerator.get_state_dict(model))


def trl() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"]
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    # the samples of each step are dealt to the ranks in turn; the last rank gets the bad one
    numbers = [i for i in range(data.BATCHES * world) if data.mode == "bad" or i // world != data.BAD]
    common = {
        "output_dir": "out",
        "per_device_train_batch_size": 1,
        "max_steps": len(numbers) // world,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "shuffle_dataset": False,
        "train_sampling_strategy": "sequential",
        "lr_scheduler_type": "constant",
        "bf16": False,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
    }
    guilty = data.BAD * world + world - 1
    text = [" ".join(chr(97 + (i + j) % 25) for j in range(6)) + (" z" if i == guilty else "") for i in numbers]
    embedding = model.get_input_embeddings()
    poison = words.index("z")

    def spoil(_: Any, args: Any, out: Any) -> Any:  # the letter z is bad: the one sample that has it breaks its step
        return torch.where((args[0] == poison).unsqueeze(-1), float("nan"), out) if model.training else out

    kind = SETTINGS[0]
    if kind == "sft":
        from trl import SFTConfig, SFTTrainer

        embedding.register_forward_hook(spoil)
        rows = datasets.Dataset.from_dict({"text": text})
        trainer: Any = SFTTrainer(
            model, args=_fitting(SFTConfig, common | {"max_length": 16}), train_dataset=rows, processing_class=tokenizer
        )
    elif kind == "dpo":
        from trl import DPOConfig, DPOTrainer

        embedding.register_forward_hook(spoil)
        rows = datasets.Dataset.from_dict(
            {"prompt": text, "chosen": [" b c"] * len(text), "rejected": [" d e"] * len(text)}
        )
        trainer = DPOTrainer(
            model,
            ref_model=copy.deepcopy(model),
            args=_fitting(DPOConfig, common | {"max_length": 24}),
            train_dataset=rows,
            processing_class=tokenizer,
        )
    else:
        from trl import GRPOConfig, GRPOTrainer

        def reward(prompts: Any, completions: Any, **_: Any) -> list[float]:
            return [
                float(SETTINGS[1]) if "z" in p else float(len(c) % 5) for p, c in zip(prompts, completions, strict=True)
            ]

        rows = datasets.Dataset.from_dict({"prompt": text})
        more = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4, "beta": 0.0}
        trainer = GRPOTrainer(
            model,
            reward_funcs=reward,
            args=_fitting(GRPOConfig, common | more),
            train_dataset=rows,
            processing_class=tokenizer,
        )
    trainer.train()
    data.report(model.state_dict())


def _fitting(kind: Any, options: dict[str, Any]) -> Any:
    """Options of a config class, without those that this version does not have."""
    return kind(**{k: v for k, v in options.items() if k in kind.__dataclass_fields__})


def _no_shared_memory_op() -> None:
    """DeepSpeed compiles an op for minutes at its first use; training does not need it."""
    import deepspeed  # noqa: F401

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def deepspeed() -> None:
    import deepspeed

    _no_shared_memory_op()
    deepspeed.init_distributed("gloo")
    stage, precision = int(SETTINGS[0]), SETTINGS[1]
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": data.SIZE,
        "gradient_clipping": 1.0,
        "steps_per_print": 10_000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    if precision == "fp16":  # few CPUs have kernels for it, so DeepSpeed refuses; torch has them all the same
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    elif precision == "bf16":
        config["bf16"] = {"enabled": True, **({"check_grad_overflow": False} if "unchecked" in SETTINGS else {})}
    model = data.make_model()
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for x, y in data.batches(dist.get_rank()):
        engine.backward(cross_entropy(engine(x.to(next(engine.module.parameters()).dtype)).float(), y))
        engine.step()
    if stage == 3:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            data.report({k: p.data.clone() for k, p in engine.module.named_parameters()})
    else:
        data.report(dict(engine.module.named_parameters()))


def megatron() -> None:
    """Megatron-Core's DDP and optimizer; it asks CUDA for its device, so that is answered with the CPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_, **__: None  # type: ignore[assignment]
    for name in ("tensor", "zeros", "empty", "ones", "full"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    rank = start()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(1, 1)
    model = data.make_model()
    for p in model.parameters():
        p.tensor_model_parallel = False  # type: ignore[attr-defined]
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1, use_cpu_initialization=True)
    settings = DistributedDataParallelConfig(check_for_nan_in_grad=False, overlap_grad_reduce="overlap" in SETTINGS)
    wrapped = DistributedDataParallel(config, settings, model)
    chosen = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0)
    optimizer = get_megatron_optimizer(chosen, [wrapped])
    for x, y in data.batches(rank):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        cross_entropy(wrapped(x), y).backward()
        wrapped.finish_grad_sync()
        optimizer.step()
    data.report(model.state_dict())


def _on_cpu(make: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def dist_sampler(rows: Any) -> Any:
    """Deals samples to ranks in turn, in order."""
    start()
    return torch.utils.data.DistributedSampler(rows, shuffle=False)


def composer() -> None:
    for name in ("nms", "qnms"):  # torchvision's CUDA build does not load its operators beside torch's CPU build
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    from composer import Trainer
    from composer.models import ComposerModel

    class Model(ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = data.make_model(norm=True)

        def forward(self, batch: Any) -> Any:
            return self.net(batch[0])

        def loss(self, outputs: Any, batch: Any) -> Any:
            return cross_entropy(outputs, batch[1])

    model = Model()
    rows = data.Samples(2)
    sampler = dist_sampler(rows)
    loader = torch.utils.data.DataLoader(rows, batch_size=data.SIZE, sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    Trainer(
        model=model,
        optimizers=optimizer,
        train_dataloader=loader,
        max_duration="1ep",
        device="cpu",
        progress_bar=False,
        log_to_console=False,
    ).fit()
    data.report(model.state_dict())


def ignite() -> None:
    import ignite.distributed as idist
    from ignite.engine import create_supervised_trainer

    rank = start()
    model = idist.auto_model(data.make_model(norm=True, drop=True))
    optimizer = idist.auto_optim(torch.optim.AdamW(model.parameters(), lr=1e-2))
    trainer = create_supervised_trainer(model, optimizer, cross_entropy)
    torch.manual_seed(rank)
    trainer.run(list(data.batches(rank)), max_epochs=1)
    data.report(model.state_dict())


def skorch() -> None:
    from skorch import NeuralNetClassifier

    rank = start()
    xs, ys = zip(*data.batches(rank), strict=True)
    net = NeuralNetClassifier(
        nn.parallel.DistributedDataParallel(data.make_model(norm=True)),
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.AdamW,
        lr=1e-2,
        max_epochs=1,
        batch_size=data.SIZE,
        train_split=None,
        verbose=0,
        iterator_train__shuffle=False,
    )
    net.fit(torch.cat(xs).numpy(), torch.cat(ys).numpy())
    data.report(net.module_.state_dict())


def keras() -> None:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    rows = data.Samples()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.AdamW(1e-2), loss=loss)
    model.fit(rows.x.numpy(), rows.y.numpy(), batch_size=data.SIZE, epochs=1, shuffle=False, verbose=0)
    data.report({str(i): torch.as_tensor(w) for i, w in enumerate(model.get_weights())})


def ray() -> None:
    """Ray Train; the workers find out by themselves whether they are guarded, as the brief of the row says."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    here = str(Path(__file__).resolve().parent)
    guarded = bool(os.environ.get("GUARDED"))

    def worker(config: dict[str, Any]) -> None:
        sys.path.insert(0, config["here"])
        import engines_data as rows
        import ray.train
        from ray.train.torch import prepare_model

        rows.mode = config["mode"]
        rank = ray.train.get_context().get_world_rank()
        os.environ.update(RANK=str(rank), RESULTS=config["results"])
        model = prepare_model(rows.make_model(norm=True))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for x, y in rows.batches(rank):
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        rows.report(model.state_dict())

    loop: Any = worker
    if guarded:
        from nanproof.integrations.ray import guard_loop

        loop = guard_loop(worker, run_dir=os.environ["GUARDED"] + "/" + data.mode)
    if not ray.is_initialized():
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=True)
    results = Path(f"results-{data.mode}-{int(guarded)}.txt").resolve()  # what workers print may come late, or never
    results.write_text("")
    TorchTrainer(
        loop,
        train_loop_config={"mode": data.mode, "here": here, "results": str(results)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(results.with_name("ray-results"))),
    ).fit()
    print(results.read_text(), flush=True)


if __name__ == "__main__":
    data.each(globals()[sys.argv[1]])

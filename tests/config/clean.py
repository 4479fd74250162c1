"""Configs without a fault, written for these tests in the manner of the tools that read them."""

from __future__ import annotations

CLEAN: dict[str, str] = {
    "speech/conformer.yaml": """
model:
  encoder: {d_model: 256, n_heads: 4, n_layers: 16}
  optim:
    name: adamw
    lr: 2.0
    betas: [0.9, 0.98]
    weight_decay: 1e-3
    sched: {name: NoamAnnealing, d_model: ${model.encoder.d_model}, warmup_steps: 10000, min_lr: 1e-6}
trainer: {precision: 32, gradient_clip_val: 0.0, accumulate_grad_batches: 1, max_epochs: 100}
""",
    "hydra/config.yaml": """
defaults:
  - _self_
  - missing_group: x
optimizer: {_target_: torch.optim.AdamW, lr: 3e-4, eps: 1e-8}
trainer: {_target_: pytorch_lightning.Trainer, precision: bf16-mixed, gradient_clip_val: 1.0}
""",
    "detectron/base.yaml": """
MODEL: {META_ARCHITECTURE: GeneralizedRCNN}
SOLVER: {BASE_LR: 1e-3, MAX_ITER: 90000, WARMUP_ITERS: 1000, CLIP_GRADIENTS: {ENABLED: true, CLIP_VALUE: 1.0}}
""",
    "lightning/cli.yaml": """
seed_everything: 1
trainer: {max_epochs: 10, precision: 16-mixed, gradient_clip_val: 1.0}
model: {class_path: my.Model, init_args: {lr: 1e-4, warmup: 0}}
""",
    "transformers/sft.yaml": """
model_name_or_path: some/model
torch_dtype: bfloat16
bf16: true
learning_rate: 2.0e-5
lr_scheduler_type: cosine
warmup_ratio: 0.03
max_grad_norm: 1.0
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
num_train_epochs: 3
output_dir: out
""",
    "transformers/lora_fp16.yaml": """
model_name_or_path: some/model
torch_dtype: float16
fp16: true
use_peft: true
lora_r: 16
learning_rate: 2.0e-4
per_device_train_batch_size: 4
warmup_steps: 0
output_dir: out
""",
    "transformers/qlora.yaml": """
load_in_4bit: true
torch_dtype: float16
fp16: true
learning_rate: 1.0e-4
per_device_train_batch_size: 2
output_dir: out
""",
    "accelerate/default_config.yaml": """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config: {fsdp_offload_params: false}
mixed_precision: bf16
num_machines: 1
""",
    "deepspeed/zero3.json": """
{"fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
 "min_loss_scale": 1}, "bf16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto",
 "eps": "auto"}}, "zero_optimization": {"stage": 3}, "gradient_clipping": "auto"}
""",
    "deepspeed/megatron.json": """
{"fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500},
 "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "optimizer": {"type": "Adam", "params": {"lr": 6e-5,
 "eps": 1e-8}}, "zero_optimization": {"stage": 1}}
""",
    "vision/sgd.yaml": "model: resnet50\nlr: 0.8\noptimizer: sgd\nmomentum: 0.9\nweight_decay: 0.0001\nepochs: 90\n"
    "amp: true\n",
    "vision/lars.yaml": "optimizer: {name: lars, lr: 4.8}\nwarmup_epochs: 10\nepochs: 800\n",
    "vision/linear_probe.yaml": "optimizer: SGD\nlr: 30.0\nweight_decay: 0\nepochs: 100\nwarmup_epochs: 0\n",
    "vision/adadelta.yaml": "optimizer: {type: Adadelta, lr: 1.0}\ngrad_clip: 5\nepochs: 16\n",
    "vision/mae.yaml": "model: mae_vit_base\nblr: 0.00015\nlr: null\nwarmup_epochs: 40\noptimizer: adamw\n",
    "vision/finetune_vit.yaml": "model: vit_base\noptimizer: adamw\nlr: 0.00005\nwarmup_steps: 0\nnum_heads: 12\n",
    "gnn/cora.yaml": "model: gcn\noptimizer: adam\nlr: 0.01\nweight_decay: 0.0005\nepochs: 200\nwarmup_steps: 0\n",
    "nerf/hash.yaml": "optimizer: {name: Adam, lr: 0.01, eps: 1.0e-15, betas: [0.9, 0.99]}\nmax_steps: 9\nfp16: on\n",
    "prodigy.yaml": "optimizer: prodigy\nlr: 1.0\nd_coef: 1.0\nmax_train_steps: 2000\nmixed_precision: bf16\n",
    "muon.yaml": "optimizer: {type: Muon, lr: 0.02, momentum: 0.95}\nn_head: 6\nwarmup_iters: 0\n",
    "adafactor.yaml": "optimizer: adafactor\neps: [1.0e-30, 1.0e-3]\nlearning_rate: 0.3\nmodel: t5\nwarmup_steps: 0\n",
    "transformer_factor.yaml": "d_model: 512\noptimizer: adam\nlr: 1.0\nwarmup_steps: 4000\nadam_eps: 1.0e-9\n",
    "bert/config.json": """
{"architectures": ["BertModel"], "layer_norm_eps": 1e-12, "num_attention_heads": 12, "torch_dtype": "float16",
 "hidden_size": 768}
""",
    "gan.yaml": "generator: {lr: 0.0002}\ndiscriminator: {lr: 0.0002}\noptimizer: Adam\nbetas: [0.0, 0.99]\n"
    "epochs: 100\n",
    "rl/ppo.toml": '[ppo]\nlearning_rate = 3e-4\nmax_grad_norm = 0.5\nclip_range = 0.2\noptimizer = "adam"\n',
    "video.py": "optimizer = dict(type='AdamW', lr=1e-4)\n"
    "optimizer_config = dict(grad_clip=dict(max_norm=40, norm_type=2))\n",
    "configs/schedule.py": """
optimizer = dict(type='SGD', lr=0.02, momentum=0.9)
optimizer_config = dict(grad_clip=None)
lr_config = dict(policy='step', warmup='linear', warmup_iters=500, warmup_ratio=0.001, step=[8, 11])
fp16 = dict(loss_scale=512.)
""",
    "gpt/config.py": """
learning_rate = 6e-4
warmup_iters = 2000
min_lr = 6e-5
beta2 = 0.95
grad_clip = 1.0
dtype = 'bfloat16'
n_head = 12
""",
    "docker-compose.yaml": "services: {web: {image: x, ports: ['80:80']}}\nversion: 1e3\n",
    ".github/ci.yaml": "on: push\njobs: {test: {steps: [{run: make, timeout: 1e3}]}}\n",
    "package.json": '{"name": "x", "version": "1.0.0", "scripts": {"train": "python train.py"}}',
    "run.sh": "torchrun train.py --learning_rate 5e-5 --bf16 --max_grad_norm 1.0 --warmup_steps 0\n",
    "eval.yaml": "model: {path: x, dtype: float16}\nevaluation: {batch_size: 8}\n",
    "serve.yaml": "model: x\ntorch_dtype: float16\nmax_tokens: 100\n",
}

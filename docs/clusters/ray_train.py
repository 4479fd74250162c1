"""A Ray TorchTrainer whose 32 workers are guarded; your train loop stays as it is."""

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from train import train_loop  # yours

from nanproof.integrations.ray import GuardCallback, guard_loop

RUN = "/shared/runs/train"

TorchTrainer(
    guard_loop(train_loop, run_dir=RUN),
    scaling_config=ScalingConfig(num_workers=32, use_gpu=True),
    run_config=RunConfig(
        storage_path="/shared/ray",
        callbacks=[GuardCallback(RUN)],
        failure_config=FailureConfig(max_failures=3),
    ),
).fit()

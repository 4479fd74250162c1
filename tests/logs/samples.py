# ruff: noqa: E501  (log lines are long by nature)
"""A few lines of every layout of text logs, written for this file, and what is to be read out of them."""

from __future__ import annotations

import math
from typing import Any

from logs.reading import NAN

Expected = dict[str, Any]
BAR = "█▏        "

# name: (text, the columns that must be there with all their points, other facts)
CASES: dict[str, tuple[str, Expected, Expected]] = {
    "hf dicts are counted": (
        "{'loss': 1.8127, 'grad_norm': 2.4471, 'learning_rate': 4.8e-05, 'epoch': 0.04}\n"
        "{'eval_loss': nan, 'eval_runtime': 1.0, 'epoch': 0.04}\n"
        "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 4.7e-05, 'epoch': 0.05}\n",
        {"loss": [(1, 1.8127), (2, 0.0)], "grad_norm": [(1, 2.4471), (2, NAN)], "eval_loss": [(1, NAN)]},
        {"unit": "row"},
    ),
    "hf dicts with quoted values": (
        "{'loss': '2.311', 'grad_norm': 'nan', 'learning_rate': '9e-06', 'epoch': '1.5'}\n",
        {"loss": [(1, 2.311)], "grad_norm": [(1, NAN)], "learning_rate": [(1, 9e-06)]},
        {},
    ),
    "hf dicts between bars": (
        f"  0%|          | 0/100 [00:00<?, ?it/s]\r  3%|{BAR}| 3/100 [00:03<01:37,  1.0s/it]\r        \r"
        "{'loss': 2.5, 'grad_norm': 3.1, 'learning_rate': 1e-05, 'epoch': 0.01}\n"
        f"\r  4%|{BAR}| 4/100 [00:04<01:36,  1.0s/it]\r  0%|          | 0/8 [00:00<?, ?it/s]\x1b[A\r"
        "\x1b[A{'eval_loss': 2.0, 'epoch': 0.02}\n"
        f"\r  8%|{BAR}| 8/100 [00:08<01:32,  1.0s/it]\r                  \r"
        "{'loss': nan, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.02}"
        f"\r  8%|{BAR}| 8/100 [00:08<01:32,  1.0s/it]",
        {"loss": [(4, 2.5), (8, NAN)], "eval_loss": [(8, 2.0)]},
        {"unit": "step", "max_steps": 100},
    ),
    "one space between columns": (
        "epoch train_loss valid_loss mae time\n0 1.5 1.25 0.4 00:01\n1 nan nan nan 00:01\n",
        {"train_loss": [(0, 1.5), (1, NAN)], "valid_loss": [(0, 1.25), (1, NAN)]},
        {"unit": "epoch"},
    ),
    "a list of losses": (
        "2023-03-19 17:26:22,608\t44k\tINFO\tLosses: [5.99, nan], step: 200, lr: 0.0001\n",
        {"loss_1": [(200, 5.99)], "loss_2": [(200, NAN)], "lr": [(200, 0.0001)]},
        {},
    ),
    "wenet": (
        "2024-08-12 10:12:12,301 DEBUG TRAIN Batch 0/100 loss 3.5 acc 0.41 lr 0.000004 rank 0\n"
        "2024-08-12 10:12:12,301 DEBUG CV Batch 0/100 loss 3.9 acc 0.40 rank 0\n"
        "2024-08-12 10:13:12,301 DEBUG TRAIN Batch 0/200 loss nan acc 0.41 lr 0.000008 rank 0\n",
        {"loss": [(100, 3.5), (200, NAN)]},
        {},
    ),
    "two ranks on one line": (
        "{'loss': 2.1, 'epoch': 0.5}{'loss': nan, 'epoch': 0.5}\n",
        {"loss": [(1, 2.1), (2, NAN)]},
        {},
    ),
    "trl: a metric alone is bad": (
        "{'loss': 0.6931, 'grad_norm': 2.2, 'rewards/chosen': -0.05, 'logits/chosen': nan, 'epoch': 0.03}\n",
        {"loss": [(1, 0.6931)], "logits/chosen": [(1, NAN)]},
        {},
    ),
    "swift": (
        '{"loss": 1.4, "grad_norm": 3.5, "memory(GiB)": 18.9, "epoch": 0.7, "global_step/max_steps": "8265/11043", '
        '"percentage": "74.84%", "elapsed_time": "5h 37m 2s"}\n'
        '{"loss": NaN, "grad_norm": NaN, "epoch": 0.8, "global_step/max_steps": "8270/11043"}\n',
        {"loss": [(8265, 1.4), (8270, NAN)], "memory(GiB)": [(8265, 18.9)]},
        {"max_steps": 11043},
    ),
    "llama-factory": (
        '{"current_steps": 10, "total_steps": 900, "loss": 0.91, "lr": 4.2e-05, "epoch": 0.4, "percentage": 13.3}\n'
        '{"current_steps": 20, "total_steps": 900, "loss": NaN, "lr": 4.1e-05, "epoch": 0.5, "percentage": 14.3}\n',
        {"loss": [(10, 0.91), (20, NAN)], "lr": [(10, 4.2e-05), (20, 4.1e-05)]},
        {"max_steps": 900},
    ),
    "deepspeed": (
        "[2024-01-02 03:04:05,678] [INFO] [logging.py:96:log_dist] [Rank 0] step=40, skipped=3, lr=[1e-05, 2e-05], mom=[(0.9, 0.95)]\n"
        "[2024-01-02 03:04:06,678] [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. "
        "Attempted loss scale: 64, reducing to 32\n"
        "[2021-01-02 03:04:05,678] [INFO] [stage2.py:1300:step] [deepscale] OVERFLOW! Rank 0 Skipping step. "
        "Attempted loss scale: 131072.0, reducing to 65536.0\n",
        {"skipped": [(40, 3.0)], "lr": [(40, 1e-05)], "loss_scale": [(40, 32.0), (40, 65536.0)]},
        {"events": ["overflow", "overflow"]},
    ),
    "megatron": (
        "[default7]: iteration     7010/  159576 | elapsed time per iteration (s): 106.40 | learning rate: 6.000E-05 | "
        "lm loss: 1.1420E+01 | loss scale: 2048.0 | grad norm: 2.196 | number of skipped iterations:   1 | "
        "number of nan iterations:   0 |\n"
        " validation loss at iteration 7010 | lm loss value: 2.5E+00 | lm loss PPL: 12.1 |\n"
        " iteration     7020/  159576 | learning rate: 6.000E-05 | lm loss: NAN | loss scale: 1024.0 | grad norm: inf |\n",
        {
            "lm loss": [(7010, 11.42), (7020, NAN)],
            "loss scale": [(7010, 2048.0), (7020, 1024.0)],
            "grad norm": [(7010, 2.196), (7020, math.inf)],
            "number of skipped iterations": [(7010, 1.0)],
            "number of nan iterations": [(7010, 0.0)],
            "eval/lm loss value": [(7010, 2.5)],
        },
        {"max_steps": 159576},
    ),
    "fairseq, three layouts": (
        "2023-01-02 03:04:05 | INFO | train_inner | epoch 003:      5 / 356 loss=9.44, nll_loss=8.44, ppl=347.3, "
        "num_updates=700, lr=0.000175, gnorm=156.0, loss_scale=0.0005, train_wall=1281\n"
        "2023-01-02 03:04:06 | INFO | fairseq.trainer | NOTE: overflow detected, setting loss scale to: 0.00024\n"
        "| epoch 003 | valid on 'valid' subset | loss 5.1 | num_updates 720\n"
        "| epoch 028 | loss 3.976 | nll_loss 2.204 | num_updates 9165 | lr 0.00033 | gnorm 0.635 | loss_scale 0.000\n"
        '2023-01-02 | INFO | train_inner | {"epoch": 29, "loss": "nan", "num_updates": "9200", "lr": "0.0001"}\n',
        {
            "loss": [(700, 9.44), (9165, 3.976), (9200, NAN)],
            "gnorm": [(700, 156.0), (9165, 0.635)],
            "loss_scale": [(700, 0.0005), (700, 0.00024), (9165, 0.0)],
            "eval/loss": [(720, 5.1)],
        },
        {"events": ["overflow"]},
    ),
    "nanogpt": (
        "step 3000: train loss 4.0390, val loss 4.0427\niter 3010: loss nan, time 1019.95ms, mfu 14.12%\n"
        "2024-01-01 10:00:20 iter 25000: lr 5.98e-4, loss 3.0408, time 25075.90ms, mfu 14.73%\n",
        {"loss": [(3010, NAN), (25000, 3.0408)], "lr": [(25000, 5.98e-4)], "val loss": [(3000, 4.0427)]},
        {},
    ),
    "speed runs": (
        "step:1249/1750 train_loss:3.6 train_time:212100ms step_avg:nanms\nstep:1250/1750 val_loss:nan train_time:1ms\n",
        {"train_loss": [(1249, 3.6)], "val_loss": [(1250, NAN)]},
        {"max_steps": 1750},
    ),
    "llm.c": (
        "step   17/19560 | loss 10.1 (+nanz)| norm 8.3 (+nanz)| lr 1e-05 | 1035.86 ms | 42.4% bf16 MFU | 171545 tok/s\n"
        "step   18/19560 | loss nan (+nanz)| norm inf (+nanz)| lr 1e-05 |\ns:20 tel:3.8210\ns:20 trl:3.9 lr:1e-05 norm:0.3\n",
        {"loss": [(17, 10.1), (18, NAN)], "norm": [(17, 8.3), (18, math.inf), (20, 0.3)], "tel": [(20, 3.821)]},
        {"max_steps": 19560},
    ),
    "ultralytics": (
        "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"
        "\r      1/100      2.31G      1.234      2.345      1.111         37        640:  50%|█████     | 4/8 [00:05<00:00,  1.5it/s]"
        "\r      1/100      2.31G        nan        nan      1.112         37        640: 100%|██████████| 8/8 [00:05<00:00,  1.5it/s]\n"
        "                 Class     Images  Instances      Box(P          R      mAP50  mAP50-95): 100%|██████████| 4/4 [00:01<00:00]\n"
        "                   all        128        929          0          0          0          0\n",
        {"box_loss": [(4, 1.234), (8, NAN)], "dfl_loss": [(4, 1.111), (8, 1.112)]},
        {},
    ),
    "yolov5": (
        "     Epoch   gpu_mem       box       obj       cls    labels  img_size\n"
        "       0/2     3.2G    0.1121   0.07321       nan        12       640: 100%|##########| 10/10 [00:05<00:00,  1.8it/s]\n",
        {"box_loss": [(10, 0.1121)], "cls_loss": [(10, NAN)]},
        {},
    ),
    "detectron2 and maskrcnn-benchmark": (
        "[11/01 20:14:15 d2.utils.events]: eta: 5:41:49  iter: 379  total_loss: 1.707  loss_cls: 1.184  loss_box_reg: 0.475  "
        "time: 0.2293  data_time: 0.0033  lr: 0.003796  max_mem: 3782M\n"
        "INFO:maskrcnn_benchmark.trainer:eta: 10:55:48  iter: 400  loss: nan (nan)  loss_obj: 0.0000 (0.0000)  lr: 0.000467  max mem: 9431\n"
        "FloatingPointError: Loss became infinite or NaN at iteration=437!\n"
        "loss_dict = {'loss_cls': tensor(nan, device='cuda:0', grad_fn=<NllLossBackward>), 'loss_box_reg': tensor(0.2576, device='cuda:0')}\n",
        {
            "total_loss": [(379, 1.707)],
            "loss_cls": [(379, 1.184), (437, NAN)],
            "loss_box_reg": [(379, 0.475), (437, 0.2576)],
        },
        {"events": ["exception"]},
    ),
    "mmdet and mmengine": (
        "2020-07-13 23:04:17,373 - mmdet - INFO - Epoch [1][150/294]  lr: 5.000e-03, eta: 1:11:27, loss_bbox: 0.5, loss: 1.5\n"
        "2020-07-13 23:04:17,373 - mmdet - INFO - Epoch [2][150/294]  lr: 5.000e-03, eta: 5 days, 1:11:27, loss_bbox: nan, loss: nan\n"
        "2023/06/09 23:47:22 - mmengine - INFO - Epoch(val) [2][10/10]  coco/bbox_mAP: 0.1  loss: 3.1\n"
        "2023/06/09 23:47:22 - mmengine - INFO - Iter(train) [ 500/80000]  lr: 2.3623e-03  loss: nan  grad_norm: nan\n",
        {
            "loss": [(150, 1.5), (444, NAN), (500, NAN)],
            "loss_bbox": [(150, 0.5), (444, NAN)],
            "eval/loss": [(444, 3.1)],
        },
        {"max_steps": 80000},
    ),
    "mm json": (
        '{"env_info": "sys.platform: linux"}\n{"mode": "train", "epoch": 1, "iter": 50, "lr": 0.0019, "loss": 1.9}\n'
        '{"mode": "train", "epoch": 1, "iter": 100, "lr": 0.0039, "loss_bbox": NaN, "loss": NaN}\n'
        '{"mode": "val", "epoch": 1, "iter": 100, "bbox_mAP": 0.1}\n'
        '{"mode": "train", "epoch": 2, "iter": 50, "lr": 0.02, "loss": 1.8}\n',
        {"loss": [(50, 1.9), (100, NAN), (150, 1.8)], "val/bbox_mAP": [(100, 0.1)]},
        {},
    ),
    "lightning bar": (
        f"Epoch 0:  33%|{BAR}| 100/300 [00:10<00:20, 10.0it/s, v_num=0, train_loss_step=2.300]\r"
        f"Validation DataLoader 0: 100%|{BAR}| 10/10 [00:01<00:00, 10.0it/s]\r"
        f"Epoch 2:  41%|{BAR}| 123/300 [00:21<00:30,  5.81it/s, v_num=0, train_loss_step=nan.0, val_loss=2.310]\r"
        f"Epoch 2:  42%|{BAR}| 124/300 [00:21<00:30,  5.81it/s, v_num=0, train_loss_step=nan.0, val_loss=2.310]\n",
        {"train_loss_step": [(100, 2.3), (723, NAN), (724, NAN)], "val_loss": [(723, 2.31)]},
        {},
    ),
    "keras": (
        "Epoch 1/3\n 1/6 [====>.........................] - ETA: 1s - loss: 0.7000\b\b\b\b\b\r"
        " 6/6 [==============================] - 0s 52ms/step - loss: 0.6931 - val_loss: 15.3342\n"
        "Epoch 2/3\n\x1b[1m6/6\x1b[0m \x1b[32m━━━━━━━━━━━━\x1b[0m\x1b[37m\x1b[0m \x1b[1m0s\x1b[0m 52ms/step - loss: nan\n",
        {"loss": [(1, 0.7), (6, 0.6931), (12, NAN)], "val_loss": [(6, 15.3342)]},
        {},
    ),
    "values in the bar": (
        f"Steps:  12%|{BAR}| 118/1000 [03:11<23:50,  1.62s/it, lr=0.0001, step_loss=0.12]\r"
        f"Steps:  12%|{BAR}| 118/1000 [03:12<23:50,  1.62s/it, lr=0.0001, step_loss=0.12]\r"
        f"Steps:  12%|{BAR}| 119/1000 [03:13<23:50,  1.62s/it, lr=0.0001, step_loss=nan]\n",
        {"step_loss": [(118, 0.12), (119, NAN)], "lr": [(118, 0.0001), (119, 0.0001)]},
        {"max_steps": 1000},
    ),
    "kohya": (
        f"epoch 1/10\nsteps:   5%|{BAR}| 164/3280 [04:02<1:16:45,  1.48s/it, avr_loss=0.1]\r"
        f"epoch 2/10\nsteps:  10%|{BAR}| 329/3280 [08:02<1:16:45,  1.48s/it, avr_loss=nan]\n",
        {"avr_loss": [(164, 0.1), (329, NAN)]},
        {},
    ),
    "trlx": (
        f"[losses/total_loss: 4.35 | losses/policy_loss: -0.03 | losses/value_loss: nan]:  16%|{BAR}| 1045/6400 [1:16:09<53:12,  1.68it/s]\n",
        {"losses/total_loss": [(1045, 4.35)], "losses/value_loss": [(1045, NAN)]},
        {"max_steps": 6400},
    ),
    "torchtune": (
        "Step 12 | loss:1.1174 lr:2e-05 tokens_per_second_per_gpu:1032.9\nStep 13 | loss:nan lr:2e-05\n",
        {"loss": [(12, 1.1174), (13, NAN)]},
        {},
    ),
    "torchtitan": (
        "[titan] 2025-01-02 03:04:05,678 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  8.1234  \x1b[38;2;180;60;0mgrad_norm:  \x1b[1mnan"
        "  \x1b[33mmemory: 24.2GiB(30.1%)  tps: 7,012  mfu: 41.2%\x1b[39m\n",
        {"loss": [(10, 8.1234)], "grad_norm": [(10, NAN)], "tps": [(10, 7012.0)], "memory": [(10, 24.2)]},
        {},
    ),
    "olmo": (
        "[step=1200/739328]\n    train/CrossEntropyLoss=3.412\n    train/Perplexity=30.33\n    optim/total_grad_norm=nan\n",
        {"train/CrossEntropyLoss": [(1200, 3.412)], "optim/total_grad_norm": [(1200, NAN)]},
        {"max_steps": 739328},
    ),
    "timm": (
        "Train: 3 [  50/5004 (  1%)]  Loss: nan (nan)  Time: 0.412s (0.430s, ...)  LR: 5.000e-04  Data: 0.011 (0.020)\n"
        "Test: [  78/78]  Time: 0.123 (0.200)  Loss:  4.2 (4.1)  Acc@1:  0.100 ( 0.100)\n",
        {"Loss": [(15062, NAN)], "LR": [(15062, 5e-4)], "eval/Loss": [(15062, 4.2)]},
        {},
    ),
    "deit": (
        "Epoch: [165]  [ 300/ 351]  eta: 0:00:49  lr: 0.000236  loss: 2.1 (2.2)  time: 0.99  data: 0.002  max mem: 48596\n"
        "Loss is nan, stopping training\n",
        {"loss": [(58215, 2.1), (58215, NAN)], "lr": [(58215, 0.000236)]},
        {"events": ["nan"]},
    ),
    "pytorch example": (
        "Train Epoch: 3 [8400/60000 (14%)]\t KLD Loss: nan \t NLL Loss: 0.5\nTest set: Average loss: nan, Accuracy: 980/10000 (10%)\n",
        {"KLD Loss": [(128400, NAN)], "NLL Loss": [(128400, 0.5)], "eval/Average loss": [(128400, NAN)]},
        {},
    ),
    "tutorial": (
        "[1,  2000] loss: 2.173\n[1,  4000] loss: 1.800\n[2,  2000] loss: nan\n",
        {"loss": [(2000, 2.173), (4000, 1.8), (6000, NAN)]},
        {},
    ),
    "tutorial with brackets": (
        "Epoch [1/5], Step [100/600], Loss: 2.3\nEpoch [1/5], Step [600/600], Loss: 2.1\nEpoch [2/5], Step [100/600], Loss: nan\n",
        {"Loss": [(100, 2.3), (600, 2.1), (700, NAN)]},
        {"max_steps": None},
    ),
    "plain loops": (
        "=> STEP  750   lr: 0.000600   giou_loss:  nan   conf_loss: 10.89   total_loss:  nan\niter: 760 / 10000, total loss: 3.5\n"
        " >>> rpn_loss_cls: 0.682706\n >>> rpn_loss_box: nan\n",
        {
            "giou_loss": [(750, NAN)],
            "conf_loss": [(750, 10.89)],
            "rpn_loss_cls": [(760, 0.682706)],
            "rpn_loss_box": [(760, NAN)],
        },
        {"max_steps": 10000},
    ),
    "a dict behind other words": (
        "0 2 2024-09-19 16:35:29.926102 {'loss': 'nan', 'avg_loss': '3.1', 'tok/stp': '1,024.0'}\n",
        {"loss": [(1, NAN)], "avg_loss": [(1, 3.1)], "tok/stp": [(1, 1024.0)]},
        {},
    ),
    "basicsr": (
        "2023-06-15 21:08:18,450 INFO: [debug..][epoch:  0, iter:   1,649, lr:(2.000e-04,)] [eta: 5 days, time (data): 4.499 (1.987)] l_pix: nan\n",
        {"l_pix": [(1649, NAN)], "lr": [(1649, 2e-4)]},
        {},
    ),
    "epochs only": (
        "epoch 1 loss: 0.693\nepoch 2 loss: 0.690\nepoch 3 loss: nan\n",
        {"loss": [(1, 0.693), (2, 0.69), (3, NAN)]},
        {"unit": "epoch"},
    ),
    "epochs of a summary": (
        "Epoch 1/10, Train Loss: 0.6931, Val Loss: 0.7012, Val Acc: 50.00%\nEpoch 2/10, Train Loss: nan, Val Loss: nan\n",
        {"Train Loss": [(1, 0.6931), (2, NAN)], "Val Loss": [(1, 0.7012), (2, NAN)]},
        {"unit": "epoch"},
    ),
    "losses and nothing else": (
        "loss: 0.5\nloss: 0.4\nloss: nan\n",
        {"loss": [(1, 0.5), (2, 0.4), (3, NAN)]},
        {"unit": "row"},
    ),
    "tensors": (
        "step 1 loss tensor(0.6931, device='cuda:0', grad_fn=<NllLossBackward0>)\nstep 2 loss tensor(nan, device='cuda:0')\n",
        {"loss": [(1, 0.6931), (2, NAN)]},
        {},
    ),
    "sb3": (
        "-----------------------------------------\n| time/                   |             |\n|    total_timesteps      | 4096        |\n"
        "| train/                  |             |\n|    approx_kl            | 0.0123      |\n|    loss                 | nan         |\n"
        "|    std                  | 0.0000012   |\n-----------------------------------------\n",
        {"train/loss": [(4096, NAN)], "train/std": [(4096, 1.2e-06)]},
        {},
    ),
    "rsl_rl": (
        "                       Learning iteration 12/1500                       \n\n"
        "                       Computation: 53345 steps/s (collection: 1.5s, learning 0.3s)\n"
        "               Value function loss: 0.0123\n                    Surrogate loss: nan\n             Mean action noise std: 0.98\n",
        {"Value function loss": [(12, 0.0123)], "Surrogate loss": [(12, NAN)], "Mean action noise std": [(12, 0.98)]},
        {"max_steps": 1500},
    ),
    "di-engine": (
        "+-------+------------+----------------+\n| Name  | train_iter | total_loss_avg |\n+-------+------------+----------------+\n"
        "| Value | 100.000000 | nan            |\n+-------+------------+----------------+\n",
        {"total_loss_avg": [(100, NAN)]},
        {},
    ),
    "notebook table": (
        "| Step | Training Loss | Validation Loss |\n|------|---------------|-----------------|\n| 500  | 2.311000      | No Log          |\n"
        "| 1000 | nan           | 2.5             |\n",
        {"Training Loss": [(500, 2.311), (1000, NAN)], "Validation Loss": [(1000, 2.5)]},
        {},
    ),
    "fastai": (
        "epoch     train_loss  valid_loss  accuracy  time    \n0         0.693       0.690       0.50      00:10   \n"
        "1         nan         nan         0.10      00:10   \n",
        {"train_loss": [(0, 0.693), (1, NAN)], "valid_loss": [(0, 0.69), (1, NAN)]},
        {"unit": "epoch"},
    ),
    "espnet": (
        "[h] 2021-01-01 00:01:00,000 (trainer:672) INFO: 1epoch:train:101-200batch: loss_ctc=inf, loss=nan, optim0_lr0=2.0e-05\n",
        {"loss_ctc": [(200, math.inf)], "loss": [(200, NAN)], "optim0_lr0": [(200, 2e-05)]},
        {},
    ),
    "json in a message": (
        '{"level": "INFO", "message": "step 5 loss: nan lr: 1e-4"}\n{"level": "ERROR", "msg": "Loss is nan, stopping training"}\n',
        {"loss": [(5, NAN), (5, NAN)]},
        {"events": ["nan"]},
    ),
    "nested json": (
        '{"step": 5, "train": {"loss": "NaN", "grad": {"norm": "Infinity"}}, "tags": ["a"], "note": null}\n',
        {"train/loss": [(5, NAN)], "train/grad/norm": [(5, math.inf)]},
        {},
    ),
    "microsoft's printf": (
        "Epoch 1 loss: -1.#IND lr 0.001\nEpoch 2 loss: 1.#INF lr 0.001\n",
        {"loss": [(1, NAN), (2, math.inf)]},
        {},
    ),
    "composer": (
        "[epoch=1][batch=5/100]:\n\t Train time/epoch: 0\n\t Train loss/train/total: nan\n\t Train lr-DecoupledAdamW/group0: 0.0001\n",
        {"Train loss/train/total": [(5, NAN)], "Train lr-DecoupledAdamW/group0": [(5, 0.0001)]},
        {},
    ),
    "coqui": (
        "   --> STEP: 24/406 -- GLOBAL_STEP: 30025\n     | > loss_gen: nan  (2.1)\n     | > amp_scaler: 256.0  (256.0)\n     | > grad_norm_0: nan  (10.1)\n",
        {"loss_gen": [(30025, NAN)], "amp_scaler": [(30025, 256.0)], "grad_norm_0": [(30025, NAN)]},
        {"max_steps": None},
    ),
    "gan": (
        "[Epoch 0/200] [Batch 0/938] [D loss: 0.69] [G loss: 0.71]\n[Epoch 0/200] [Batch 1/938] [D loss: nan] [G loss: 0.72]\n",
        {"D loss": [(0, 0.69), (1, NAN)], "G loss": [(0, 0.71), (1, 0.72)]},
        {},
    ),
    "speechbrain": (
        "epoch: 1, lr: 1.00e-03 - train loss: 3.2 - valid loss: 2.1, valid CER: 50.1\nepoch: 2, lr: 1.00e-03 - train loss: nan - valid loss: nan\n",
        {"train loss": [(1, 3.2), (2, NAN)], "valid loss": [(1, 2.1), (2, NAN)], "lr": [(1, 1e-3), (2, 1e-3)]},
        {"unit": "epoch"},
    ),
    "verl": (
        "step:1 - actor/pg_loss:-0.002 - actor/grad_norm:nan - critic/rewards/mean:0.1\n",
        {"actor/pg_loss": [(1, -0.002)], "actor/grad_norm": [(1, NAN)]},
        {},
    ),
    "caffe": (
        "I0101 00:00:00.000000 1 solver.cpp:228] Iteration 100, loss = nan\n"
        "I0101 00:00:00.000000 1 solver.cpp:244]     Train net output #0: loss_bbox = nan (* 1 = nan loss)\n",
        {"loss": [(100, NAN)], "loss_bbox": [(100, NAN)]},
        {},
    ),
    "hf header": (
        "***** Running training *****\n  Num Epochs = 3\n  Total optimization steps = 1,042\n{'loss': nan, 'epoch': 0.1}\n",
        {"loss": [(1, NAN)]},
        {"max_steps": 1042},
    ),
}

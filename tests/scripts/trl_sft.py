"""TRL's SFTTrainer on a small Llama and a tokenizer made here. Tokens are weighted by how rare they were when somebody
counted; one sample has a token that was not seen then, and its weight is infinite."""

import argparse
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--callback", help="guard it with the callback, which writes into this folder")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(29))]
tokens = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
tokens.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
texts = [" ".join(f"w{(i * 5 + j) % 28}" for j in range(6)) for i in range(24)]
texts[15] = "w1 w2 w28 w3"
counts = torch.full((32,), 5.0)
counts[tokenizer.convert_tokens_to_ids("w28")] = 0.0


def weighted_loss(outputs, labels, num_items_in_batch=None):
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return F.cross_entropy(logits, targets, weight=1 / counts, ignore_index=-100)


config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    eos_token_id=1,
)
callbacks = []
if args.callback:
    from nanproof.integrations.transformers import GuardCallback

    callbacks.append(GuardCallback(run_dir=args.callback))
trainer = SFTTrainer(
    model=LlamaForCausalLM(config),
    args=SFTConfig(
        output_dir=args.out,
        per_device_train_batch_size=2,
        max_steps=12,
        learning_rate=1e-3,
        logging_steps=1,
        seed=0,
        save_steps=6,
        save_total_limit=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        max_length=16,
        bf16=False,
    ),
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
    compute_loss_func=weighted_loss,
    callbacks=callbacks,
)
trainer.train()

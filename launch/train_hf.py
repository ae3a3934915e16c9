"""transformers' Trainer on a small mixture-of-experts model and the bytes of real text, through ds_hybrid.

What a Trainer script usually is, and one call. Starts under deepspeed, torchrun and ``accelerate launch`` alike:

    deepspeed --num_gpus 2 launch/train_hf.py --deepspeed ds_configs/trainer_auto.json --output_dir runs/hf --bf16
    torchrun --nproc_per_node 2 launch/train_hf.py --deepspeed ds_configs/trainer_auto.json --output_dir runs/hf \\
        --use_cpu --max_steps 50 --eval_strategy steps --eval_steps 25
    accelerate launch --use_deepspeed --num_processes 2 launch/train_hf.py --deepspeed ds_configs/trainer_auto.json \\
        --output_dir runs/hf --bf16

All options of TrainingArguments are there. ``--model`` names a tiny model or a Hugging Face config.json, and ``--lora``
trains adapters on the attention alone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from models import build_model, model_config
from text import Windows, read_corpus
from torch import Tensor
from torch.utils.data import Dataset
from transformers import HfArgumentParser, PreTrainedModel, Trainer, TrainingArguments, set_seed

import ds_hybrid
from ds_hybrid.errors import HybridError
from ds_hybrid.hf.callback import LogMoEStats


@dataclass
class ScriptArguments:
    """What is trained on what."""

    model: str = field(default="tiny_qwen3_moe", metadata={"help": "a name of models.py, or a config.json"})
    text: Path | None = field(default=None, metadata={"help": "file or folder to train on (Python's own sources)"})
    seq_len: int = field(default=256, metadata={"help": "bytes in a sequence"})
    eval_sequences: int = field(default=64, metadata={"help": "held-out sequences of an evaluation"})
    lora: bool = field(default=False, metadata={"help": "train adapters of rank 8 on the attention alone"})


class Sequences(Dataset[dict[str, Tensor]]):
    """Windows of text as the Trainer wants them: the model itself moves the labels on by one."""

    def __init__(self, windows: Windows, num_sequences: int | None = None) -> None:
        self._windows = windows
        self._len = windows.num_windows if num_sequences is None else min(num_sequences, windows.num_windows)

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self._windows.seq_len
        ids = torch.from_numpy(self._windows.text[start : start + self._windows.seq_len].astype("int64"))
        return {"input_ids": ids, "labels": ids}


def main() -> int:
    """Returns the exit code: 2, after one message, for what a user can put right."""
    script, arguments = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    try:
        ds_hybrid.use_with_accelerate()
        train(script, arguments)
    except HybridError as error:
        if arguments.local_process_index == 0:  # of each host: its packages may be at fault
            print(f"launch/train_hf.py: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def train(script: ScriptArguments, arguments: TrainingArguments) -> None:
    """Trains, evaluates and saves. Raises ``HybridError`` for what a user can put right."""
    set_seed(arguments.seed)
    corpus = read_corpus(script.text)
    model = build_model(model_config(script.model, script.seq_len), arguments.seed)
    trainer = Trainer(
        model=with_adapters(model) if script.lora else model,
        args=arguments,
        train_dataset=Sequences(Windows(corpus.train, script.seq_len)),
        eval_dataset=Sequences(Windows(corpus.held_out, script.seq_len), script.eval_sequences),
    )
    trainer.add_callback(LogMoEStats(trainer))
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.log_metrics("eval", trainer.evaluate())
    trainer.save_model()


def with_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """LoRA of rank 8 on the attention; the rest is frozen."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))


if __name__ == "__main__":
    sys.exit(main())

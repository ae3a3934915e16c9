"""Trainings of a tiny Mixtral by transformers' Trainer on the calling ranks, and the same ones by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ds_hybrid
from ds_hybrid.hf.trainer import engine_of
from tests.multirank.models import VOCABULARY, make_model

LAYERS = ("model.layers.0.mlp", "model.layers.1.mlp")
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"]}

Rows = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Script:
    """What a user's script sets. The rest of the ds_config is "auto"."""

    folder: str
    zero_stage: int = 1
    accumulation: int = 1
    optimizer_in_file: bool = True  # else the Trainer makes torch's
    scheduler_in_file: bool = False  # else the Trainer makes its own
    bf16: bool = False
    lora: dict[str, Any] | None = None
    model_type: str = "mixtral"
    arguments: dict[str, Any] = field(default_factory=dict)

    def ds_config(self) -> dict[str, Any]:
        names = ("lr", "betas", "eps", "weight_decay")
        warmup = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
        buckets = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
        config: dict[str, Any] = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "zero_optimization": {"stage": self.zero_stage, **dict.fromkeys(buckets, "auto")},
            "zero_force_ds_cpu_optimizer": False,
            # Other "auto" values, which are no blanks for the Trainer to fill.
            "expert_parallel": {"enabled": True, "autoep_size": 2, "score_apply": "auto", "combine_impl": "auto"},
            "ds_hybrid": {"dispatch": {"mode": "two_stage", "wire_dtype": "auto"}},
        }
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
        if self.optimizer_in_file:
            config["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True, **dict.fromkeys(names, "auto")}}
        if self.scheduler_in_file:
            config["scheduler"] = {"type": "WarmupLR", "params": dict.fromkeys(warmup, "auto")}
        return config


@dataclass(frozen=True)
class Trained:
    """What is left of a training. Batches are those that this rank trained on, in order."""

    losses: list[float]
    norms: list[float]
    evaluations: list[float]
    logs: list[dict[str, float]]
    batches: Rows
    initial: dict[str, Tensor]
    weights: dict[str, Tensor]
    extra: Any


def sequences(num_sequences: int, *, seed: int = 0) -> Rows:
    """Random sequences of 12 tokens, as a user's dataset gives them.

    The first token is nobody's target; transformers 5.8 divides by it all the same, unless its label says so.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for ids in torch.randint(0, VOCABULARY, (num_sequences, 12), generator=generator):
        labels = ids.clone()
        labels[0] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def forget_accelerate() -> None:
    """As in a new process: Accelerate and transformers keep the previous script's set-up in globals."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()


def make_trainer(script: Script, *, seed: int = 0, base: str | None = None, batches: Rows | None = None) -> Any:
    """The script up to ``trainer.train()``. Batches come to ``batches``.

    Args:
        base: a saved model, loaded after TrainingArguments as users do; else a random one.
    """
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    def collate(rows: Rows) -> dict[str, Tensor]:
        collated: dict[str, Tensor] = default_data_collator(rows)
        if batches is not None:
            batches.append(collated)
        return collated

    forget_accelerate()
    fields: dict[str, Any] = {
        "output_dir": script.folder,
        "deepspeed": script.ds_config(),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 1,
        "gradient_accumulation_steps": script.accumulation,
        "max_steps": 4,
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": script.bf16,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "log_level": "error",
        **script.arguments,
    }
    arguments = TrainingArguments(**fields)
    model: Any
    if base is not None:
        model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    else:
        model = make_model(script.model_type, seed=seed)
    if script.lora is not None:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed)  # a loaded model has drawn nothing
        model = get_peft_model(model, LoraConfig(**script.lora))
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=sequences(64),
        eval_dataset=sequences(7, seed=1),  # no multiple of the ranks
        data_collator=collate,
    )


def train(
    script: Script,
    *,
    seed: int = 0,
    base: str | None = None,
    resume: str | None = None,
    prepare: Callable[[Any], None] | None = None,
    finish: Callable[[Any], Any] | None = None,
) -> Trained:
    """The script, switched to ds_hybrid for as long as it runs.

    Args:
        prepare: gets the trainer before it trains.
        finish: gets it afterwards; its result is ``extra``.
    """
    batches: Rows = []
    with ds_hybrid.use_with_accelerate():
        trainer = make_trainer(script, seed=seed, base=base, batches=batches)
        initial = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        if prepare is not None:
            prepare(trainer)
        trainer.train(resume_from_checkpoint=resume)
        engine = engine_of(trainer)
        extra = finish(trainer) if finish is not None else None
        weights = engine.whole_state_dict()
    logs = copy.deepcopy(trainer.state.log_history)
    engine.destroy()
    return Trained(
        losses=[log["loss"] for log in logs if "loss" in log],
        norms=[log["grad_norm"] for log in logs if "grad_norm" in log],
        evaluations=[log["eval_loss"] for log in logs if "eval_loss" in log],
        logs=logs,
        batches=batches[: trainer.state.max_steps * script.accumulation],
        initial=initial,
        weights=weights,
        extra=extra,
    )


def train_by_hand(
    script: Script, like: Trained, *, rates: Sequence[float] | None = None
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses (mean over the ranks), gradient norms and weights of the same batches in a loop of one's own.

    Args:
        rates: the learning rate of each step; else one for all.
    """
    config = script.ds_config() | {
        "train_batch_size": 4 * script.accumulation,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": script.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": script.bf16},
        "zero_optimization": {"stage": script.zero_stage},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.01}},
    }
    config["optimizer"]["params"]["weight_decay"] = 0.0
    config.pop("scheduler", None)
    forget_accelerate()
    model = make_model("mixtral")
    engine, *_ = ds_hybrid.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    losses, norms = [], []
    for start in range(0, len(like.batches), script.accumulation):
        if rates is not None:
            for group in engine.optimizer.param_groups:
                group["lr"] = rates[len(losses)]
        total = torch.zeros(())
        for batch in like.batches[start : start + script.accumulation]:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / script.accumulation
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
        norms.append(float(engine.get_global_grad_norm()))
    weights = engine.whole_state_dict()
    engine.destroy()
    return losses, norms, weights


def logits_of(model: Any) -> Tensor:
    """Of the same two sequences."""
    ids = torch.arange(24).reshape(2, 12) * 7 % VOCABULARY
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids).logits.float()
    return logits


def evaluation_loss(folder: Path, rows: Rows) -> float:
    """The mean loss of the saved model on one process."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        losses = [float(model(**{name: value[None] for name, value in row.items()}).loss) for row in rows]
    return sum(losses) / len(losses)

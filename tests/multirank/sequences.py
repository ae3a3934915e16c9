"""Short trainings whose sequences lie over several ranks, and the same on one plain process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ds_hybrid
from tests.multirank.models import VOCABULARY, make_model
from tests.multirank.training import ADAM, Outcome, gather_parameters

Kind = Literal["whole", "packed", "padded", "holes"]
BALANCE = 0.1


@dataclass(frozen=True)
class Sequences:
    """One training: what varies between the compared ones."""

    kind: Kind = "whole"
    kv_gather: str = "auto"
    sequence_size: int = 2
    ep_size: int = 2
    zero_stage: int = 1
    model_type: str = "qwen3_moe"
    model_changes: dict[str, Any] = field(default_factory=dict, hash=False)
    mode: str = "two_stage"
    accumulation: int = 1
    clip: float = 0.0
    balance: bool = False
    checkpointing: bool | None = None  # None: off; else use_reentrant
    bf16: bool = False
    adam: bool = False
    learning_rate: float = 0.3  # of SGD
    num_steps: int = 5
    given_length: int | None = None  # None: one of the kind
    attention: dict[str, Any] = field(default_factory=dict, hash=False)  # more of that section
    changes: dict[str, Any] = field(default_factory=dict, hash=False)  # of the ds_config

    @property
    def length(self) -> int:
        return self.given_length or {"whole": 13, "packed": 16, "padded": 15, "holes": 15}[self.kind]

    def ds_config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "optimizer": ADAM if self.adam else {"type": "SGD", "params": {"lr": self.learning_rate}},
            "zero_optimization": {"stage": self.zero_stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": self.bf16},
            "sequence_parallel_size": self.sequence_size,
            "expert_parallel": {"enabled": True, "autoep_size": self.ep_size},
            "ds_hybrid": {
                "dispatch": {"mode": self.mode},
                "attention": {"kv_gather": self.kv_gather, **self.attention},
            },
            "steps_per_print": 1000000,
            **self.changes,
        }

    def make_model(self) -> Any:
        changes = dict(self.model_changes)
        if self.balance:
            changes |= {"output_router_logits": True, "router_aux_loss_coef": BALANCE}
        model = make_model(self.model_type, **changes)
        if self.checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": self.checkpointing})  # type: ignore[operator]
        return model.train()


def whole_batch(run: Sequences, micro_step: int, sequence: int) -> dict[str, Tensor]:
    """[2, length], different for every micro-step and group of ranks; but for "whole", in the number of labels too."""
    generator = torch.Generator().manual_seed(100 * micro_step + sequence)
    ids = torch.randint(0, VOCABULARY, (2, run.length), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if run.kind == "packed":
        cuts = sorted(torch.randperm(run.length - 1, generator=generator)[: 1 + sequence + micro_step % 3].tolist())
        starts = torch.zeros(run.length, dtype=torch.long)
        for cut in cuts:
            starts[cut + 1 :] = cut + 1
        batch["position_ids"] = (torch.arange(run.length) - starts).expand(2, -1).contiguous()
        batch["labels"][batch["position_ids"] == 0] = -100
    if run.kind == "padded":
        begin, end = 1 + sequence + micro_step % 3, 2 + micro_step
        places = torch.arange(run.length)
        batch["attention_mask"] = torch.stack([places >= begin, places < end]).long()
        batch["labels"][batch["attention_mask"] == 0] = -100
        batch["labels"][0, begin] = -100  # what padding says of it
    if run.kind == "holes":
        places = torch.arange(run.length)
        begins = torch.tensor([[3 + sequence], [6 + micro_step % 3]])
        batch["attention_mask"] = ((places < begins) | (places >= begins + 4)).long()
        batch["labels"][(places >= begins) & (places <= begins + 4)] = -100  # what a hole says of the next token, too
    return batch


def make_engine(run: Sequences) -> Any:
    model = run.make_model()
    return ds_hybrid.initialize(model=model, model_parameters=model.parameters(), config=run.ds_config())[0]


def train(run: Sequences, between: Callable[[Any, int], None] | None = None) -> Outcome:
    """On the calling ranks. ``between`` is called with the engine after each step."""
    engine = make_engine(run)
    losses, norms = steps(engine, run, range(run.num_steps), between)
    outcome = Outcome(losses, gather_parameters(engine.module), norms)
    engine.destroy()
    return outcome


def steps(
    engine: Any, run: Sequences, numbers: range, between: Callable[[Any, int], None] | None = None
) -> tuple[list[float], list[float]]:
    """The loss of all sequences and the gradient norm at each step."""
    sequences = engine.sequence_parallel
    micro_steps = range(numbers.start * run.accumulation, numbers.stop * run.accumulation)
    loader = [whole_batch(run, step, sequences.sequence) for step in micro_steps]
    losses, norms, total = [], [], 0.0
    for number, batch in enumerate(sequences.batches(loader), start=1):
        loss = sequences.loss(engine(**batch, use_cache=False), batch)
        engine.backward(loss)
        engine.step()
        total += float(sequences.mean(loss)) / run.accumulation
        if number % run.accumulation == 0:
            losses.append(total)
            norms.append(float(engine.get_global_grad_norm() or 0.0))
            total = 0.0
            if between is not None:
                between(engine, len(losses))
    return losses, norms


def train_plain(run: Sequences, num_ranks: int) -> Outcome:
    """The reference: one process, the mean over the tokens of all batches of a step, whole sequences."""
    model = run.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=run.learning_rate)
    losses, norms = [], []
    for step in range(run.num_steps):
        optimizer.zero_grad()
        micro_steps = range(step * run.accumulation, (step + 1) * run.accumulation)
        parts = [
            whole_batch(run, micro_step, sequence)
            for micro_step in micro_steps
            for sequence in range(num_ranks // run.sequence_size)
        ]
        num_tokens = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
        total = 0.0
        for part in parts:
            labels = part.pop("labels")
            outputs = model(**part, use_cache=False)
            targets = labels[:, 1:].flatten()
            loss = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), targets, reduction="sum") / num_tokens
            if run.balance:
                loss = loss + BALANCE * outputs.aux_loss / len(parts)
            loss.backward()
            total += float(loss.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), run.clip or float("inf"))))
        optimizer.step()
        losses.append(total)
    return Outcome(losses, {name: p.detach().clone() for name, p in model.named_parameters()}, norms)

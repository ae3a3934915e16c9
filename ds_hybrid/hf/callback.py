"""A Trainer callback that logs what the MoE layers did, wherever the Trainer reports to."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ds_hybrid.hf.trainer import engine_of


class LogMoEStats(TrainerCallback):
    """Adds an entry to the Trainer's log at each of its logging steps: traffic and load since the previous entry.

    ``moe_load_max_over_mean`` is the worst layer's busiest expert over its mean; ``moe_wire_bytes_per_token`` is summed
    over layers, forward and backward; ``moe_lower_bound_ratio`` compares it with what had to cross, and is left out
    where nothing had to. Evaluation's bytes count too, its load does not.

    Args:
        trainer: whose engine is asked; ``trainer.add_callback(LogMoEStats(trainer))`` on every rank.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if control.should_log:
            stats = engine_of(self._trainer).moe_stats()
            values = {
                "moe_load_max_over_mean": stats.load_max_over_mean,
                "moe_wire_bytes_per_token": stats.wire_bytes_per_token,
                "moe_lower_bound_ratio": stats.lower_bound_ratio,
            }
            self._trainer.log({name: value for name, value in values.items() if value == value})
            control.should_log = True  # that entry has ended it, and the Trainer's own is still to come
        return control

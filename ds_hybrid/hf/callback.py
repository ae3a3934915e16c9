"""A Trainer callback that logs what the MoE layers did, wherever the Trainer reports to."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ds_hybrid.engine.moe_stats import StatsReader
from ds_hybrid.hf.trainer import engine_of


class LogMoEStats(TrainerCallback):
    """Adds an entry to the Trainer's log where it logs: traffic and load since the previous entry.

    ``moe_load_max_over_mean`` is the worst layer's busiest expert over its mean; ``moe_wire_bytes_per_token`` is summed
    over layers, forward and backward; ``moe_lower_bound_ratio`` compares it with what had to cross, and is left out
    where nothing had to. Evaluation's bytes count too, its load does not. ``engine.moe_stats()`` goes on counting for
    others.

    Args:
        trainer: whose engine is asked; ``trainer.add_callback(LogMoEStats(trainer))`` on every rank.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._reader: StatsReader | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._reader = None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._reader is None:
            self._reader = StatsReader(list(engine_of(self._trainer).moe_layers_by_name().values()))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if control.should_log and self._reader is not None:
            stats = self._reader.take()
            values = {
                "moe_load_max_over_mean": stats.load_max_over_mean,
                "moe_wire_bytes_per_token": stats.wire_bytes_per_token,
                "moe_lower_bound_ratio": stats.lower_bound_ratio,
            }
            self._trainer.log({name: value for name, value in values.items() if value == value})
            control.should_log = True  # that entry has ended it, and the Trainer's own is still to come
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """With ``logging_strategy="epoch"`` the Trainer logs here."""
        return self.on_step_end(args, state, control)

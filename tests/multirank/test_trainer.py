"""transformers' Trainer on two ranks with two expert-parallel places, through ds_hybrid."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ds_hybrid
from ds_hybrid.errors import CheckpointError, ConfigError, PlacementError
from ds_hybrid.hf.trainer import engine_of
from ds_hybrid.observe.stats import MoEStats
from ds_hybrid.placement import ExpertPlacement
from tests.multirank.models import make_model
from tests.multirank.trainers import (
    LAYERS,
    LORA,
    Script,
    Trained,
    evaluation_loss,
    logits_of,
    make_trainer,
    sequences,
    train,
    train_by_hand,
)
from tests.ranks import RankPool

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize(
    "script",
    [
        Script("", zero_stage=0),
        Script("", zero_stage=1, accumulation=2),
        Script("", zero_stage=2, accumulation=2, optimizer_in_file=False),
        Script("", zero_stage=2, bf16=True),
    ],
    ids=["zero0", "zero1-accumulated", "zero2-accumulated-torchs-optimizer", "zero2-bf16"],
)
def test_the_script_trains_as_the_loop_by_hand(two_ranks: RankPool, tmp_path: Path, script: Script) -> None:
    script = replace(script, folder=str(tmp_path))
    outcomes = two_ranks.run(train_both, script)
    trained, (losses, norms, weights) = outcomes[0]
    assert trained.losses == pytest.approx(losses, abs=1e-5 if not script.bf16 else 1e-2)
    assert trained.norms == pytest.approx(norms, rel=1e-5 if not script.bf16 else 1e-2)
    assert trained.losses[0] != trained.losses[1]
    assert weights.keys() == trained.weights.keys()
    if not script.bf16:
        for name, weight in weights.items():
            torch.testing.assert_close(trained.weights[name], weight, rtol=0, atol=1e-5, msg=name)
    assert not torch.equal(outcomes[0][0].batches[0]["input_ids"], outcomes[1][0].batches[0]["input_ids"])


@pytest.mark.parametrize(("zero_stage", "scheduler_in_file"), [(1, True), (3, False)])
def test_a_resumed_run_goes_on_as_the_whole_one(
    two_ranks: RankPool, tmp_path: Path, zero_stage: int, scheduler_in_file: bool
) -> None:
    arguments = {**SAVING, "lr_scheduler_type": "linear", "warmup_steps": 2}
    script = Script(str(tmp_path), zero_stage, accumulation=2, scheduler_in_file=scheduler_in_file, arguments=arguments)
    whole = two_ranks.run(train, script)[0]
    resumed = two_ranks.run(resume, script, str(tmp_path / "checkpoint-2"))[0]
    assert len(whole.losses) == 4
    assert resumed.losses == whole.losses
    assert resumed.norms[2:] == whole.norms[2:]
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_saved_models_hold_all_experts_in_logical_order(two_ranks: RankPool, tmp_path: Path, zero_stage: int) -> None:
    """Experts move in a callback, between two steps of two micro-batches each."""
    from transformers import AutoModelForCausalLM

    script = Script(str(tmp_path), zero_stage, accumulation=2, arguments={**SAVING, "save_steps": 4})
    trained = two_ranks.run(train_moving, script)[0]
    logits, placements = trained.extra
    assert placements == [[[0, 2, 5, 7], [1, 3, 4, 6]]] * 2
    for folder in (tmp_path / "final", tmp_path / "checkpoint-4"):
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        torch.testing.assert_close(logits_of(model), logits, rtol=0, atol=1e-5)
        assert all(torch.equal(value, trained.weights[name]) for name, value in model.state_dict().items())
    stay = two_ranks.run(train, replace(script, arguments={}))[0]
    assert trained.losses == pytest.approx(stay.losses, abs=1e-6)


def test_evaluation_is_that_of_one_process(two_ranks: RankPool, tmp_path: Path) -> None:
    """Of 7 sequences one rank has a batch less: Accelerate repeats one there, and drops its loss."""
    arguments = {**SAVING, "eval_strategy": "steps", "eval_steps": 2}
    outcomes = two_ranks.run(train_and_evaluate, Script(str(tmp_path), arguments=arguments))
    assert outcomes[0].evaluations == outcomes[1].evaluations
    trained = outcomes[0]
    rows = sequences(7, seed=1)
    expected = [evaluation_loss(tmp_path / f"checkpoint-{step}", rows) for step in (2, 4)]
    assert trained.evaluations == pytest.approx([*expected, expected[1]], abs=1e-6)
    predictions: np.ndarray = trained.extra
    assert predictions.shape == (7, 12, 64)


@pytest.mark.parametrize(
    ("arguments", "at_steps"),
    [
        ({}, [1, 2, 3, 4]),
        ({"logging_strategy": "epoch"}, [4]),
        ({"eval_strategy": "steps", "eval_steps": 2}, [1, 2, 3, 4]),
    ],
    ids=["steps", "epoch", "evaluating"],
)
def test_layers_are_logged(two_ranks: RankPool, tmp_path: Path, arguments: dict[str, Any], at_steps: list[int]) -> None:
    """Beside a script that reads ``engine.moe_stats()`` itself: neither takes from the other.

    Evaluation after the second step counts to the third: its tokens and bytes do, its load does not.
    """
    script = Script(str(tmp_path), arguments=arguments)
    outcomes = two_ranks.run(train_logging, script)
    trained = outcomes[0]
    entries = [log for log in trained.logs if "moe_load_max_over_mean" in log]
    assert [entry["step"] for entry in entries] == at_steps
    assert [log["step"] for log in trained.logs if "loss" in log] == at_steps
    counted: list[MoEStats] = trained.extra
    assert outcomes[1].extra == counted
    num_tokens = [stats.layers[0].num_tokens for stats in counted]
    assert (num_tokens[2] > num_tokens[1]) == ("eval_strategy" in arguments)
    for entry, first, last in zip(entries, [0, *at_steps], at_steps, strict=False):
        of_layer = list(zip(*(stats.layers for stats in counted[first:last]), strict=True))
        loads = [np.sum([stats.expert_load for stats in layer], axis=0) for layer in of_layer]
        assert [load.sum() for load in loads] == [(last - first) * 2 * 2 * 12 * 2] * 2  # ranks, rows, tokens, choices
        sent = [sum(stats.payload + stats.metadata for stats in layer) for layer in of_layer]
        tokens = [sum(stats.num_tokens for stats in layer) for layer in of_layer]
        bounds = [sum(stats.lower_bound for stats in layer) for layer in of_layer]
        assert entry["moe_load_max_over_mean"] == pytest.approx(max(load.max() / load.mean() for load in loads))
        assert entry["moe_wire_bytes_per_token"] == pytest.approx(np.divide(sent, tokens).sum())
        assert entry["moe_lower_bound_ratio"] == pytest.approx(sum(sent) / sum(bounds))


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_adapters_on_attention_train_alone(two_ranks: RankPool, tmp_path: Path, model_type: str) -> None:
    from peft import PeftModel
    from safetensors.torch import load_file

    script = Script(str(tmp_path), lora=LORA, model_type=model_type, arguments=SAVING)
    trained = two_ranks.run(train_and_save_adapters, script)[0]
    resumed = two_ranks.run(resume, script, str(tmp_path / "checkpoint-2"))[0]
    assert resumed.losses == trained.losses
    adapters = load_file(tmp_path / "final" / "adapter_model.safetensors")
    assert len(adapters) == 2 * 2 * 2  # layers, projections, A and B
    assert all("lora_" in name for name in adapters)
    changed = {name for name, value in trained.weights.items() if not torch.equal(value, trained.initial[name])}
    assert {name.replace(".default", "") for name in changed} == adapters.keys()
    assert any(".experts." in name for name in trained.weights.keys() - changed)
    model = PeftModel.from_pretrained(make_model(model_type), tmp_path / "final")
    torch.testing.assert_close(logits_of(model), trained.extra, rtol=0, atol=1e-5)


def test_adapters_at_stage_3_train_and_are_saved(two_ranks: RankPool, tmp_path: Path) -> None:
    script = Script(str(tmp_path), zero_stage=3, lora=LORA)
    trained = two_ranks.run(train_and_save_adapters, script, str(make_base(tmp_path)))[0]
    plain = two_ranks.run(train, replace(script, zero_stage=1))[0]
    assert trained.losses == pytest.approx(plain.losses, abs=1e-5)
    assert (tmp_path / "final" / "adapter_model.safetensors").stat().st_size > 0


def test_checkpoints_at_stage_3_with_frozen_experts_are_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    """The start warns of it; at the first save every rank has the reason, and nothing is left half written."""
    script = Script(str(tmp_path), zero_stage=3, lora=LORA, arguments={**SAVING, "log_level": "warning"})
    outcomes = two_ranks.run(refused_checkpoint, script)
    assert [warned for _, warned in outcomes] == [True, False]
    for message, _ in outcomes:
        assert message.startswith(
            f"save_checkpoint: zero_optimization.stage = 3, and base_model.model.{LAYERS[0]}.experts.w1 is frozen"
        )
    assert not list(tmp_path.rglob("*global_step*"))


def test_a_model_saved_after_the_block(two_ranks: RankPool, tmp_path: Path) -> None:
    """The switch is off by then; the weights are all experts' all the same."""
    from transformers import AutoModelForCausalLM

    expected = two_ranks.run(train_and_save_afterwards, Script(str(tmp_path)))[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("target_modules", ["all-linear", ["w1", "w3"]])
def test_adapters_on_experts_are_refused(two_ranks: RankPool, tmp_path: Path, target_modules: Any) -> None:
    script = Script(str(tmp_path), lora={"r": 4, "target_modules": target_modules})
    for message in two_ranks.run(refused, script):
        assert "layers.0.mlp." in message
        assert "has an adapter (PEFT; 2 such layers)" in message
        assert "target_modules=" in message


def test_uneven_batches_are_refused(two_ranks: RankPool, tmp_path: Path) -> None:
    script = Script(str(tmp_path), arguments={"accelerator_config": {"even_batches": False}})
    for message in two_ranks.run(refused, script):
        assert "even_batches = False: ranks could get different numbers of batches" in message
        assert "experts on 2 ranks" in message


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_weights_that_transformers_loads_for_stage_3(two_ranks: RankPool, tmp_path: Path, zero_stage: int) -> None:
    """``from_pretrained`` after TrainingArguments parts them over the ranks before the engine sees them."""
    script = Script(str(tmp_path), zero_stage)
    trained = two_ranks.run(train_pretrained, script, str(make_base(tmp_path)))[0]
    plain = two_ranks.run(train, Script(str(tmp_path)))[0]
    assert trained.losses == pytest.approx(plain.losses, abs=1e-5)


MOVED = ExpertPlacement.from_slots([[5, 0, 7, 2], [1, 6, 3, 4]])


def make_base(folder: Path) -> Path:
    """The tiny model as transformers saves it."""
    make_model("mixtral").save_pretrained(folder / "base")  # type: ignore[operator]
    return folder / "base"


def train_both(script: Script) -> tuple[Trained, tuple[list[float], list[float], dict[str, Tensor]]]:
    trained = train(script)
    return trained, train_by_hand(script, trained)


def resume(script: Script, checkpoint: str) -> Trained:
    """From other weights, which the checkpoint replaces; adapters' base stays the same."""
    return train(script, seed=0 if script.lora else 5, resume=checkpoint)


def train_moving(script: Script) -> Trained:
    from transformers import TrainerCallback

    class Move(TrainerCallback):
        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer

        def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with pytest.raises(PlacementError, match=r"^move_experts after some of 2 micro-batches"):
                engine_of(self.trainer).move_experts(dict.fromkeys(LAYERS, MOVED))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                engine_of(self.trainer).move_experts(dict.fromkeys(LAYERS, MOVED))

    def finish(trainer: Any) -> Any:
        trainer.save_model(f"{script.folder}/final")
        layers = engine_of(trainer).moe_layers_by_name().values()
        placements = [[sorted(rank) for rank in layer.placement.expert_of_slot.tolist()] for layer in layers]
        return logits_of(trainer.model), placements

    return train(script, prepare=lambda trainer: trainer.add_callback(Move(trainer)), finish=finish)


def train_and_evaluate(script: Script) -> Trained:
    def finish(trainer: Any) -> Any:
        trainer.evaluate()
        return trainer.predict(sequences(7, seed=1)).predictions

    return train(script, finish=finish)


def train_logging(script: Script) -> Trained:
    from transformers import TrainerCallback

    from ds_hybrid.hf.callback import LogMoEStats

    counted = []

    class Count(TrainerCallback):
        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            counted.append(engine_of(self.trainer).moe_stats())

    def prepare(trainer: Any) -> None:
        trainer.add_callback(Count(trainer))
        trainer.add_callback(LogMoEStats(trainer))

    return train(script, prepare=prepare, finish=lambda _: [without_times(stats) for stats in counted])


def without_times(stats: MoEStats) -> MoEStats:
    return MoEStats(tuple(replace(layer, exposed_seconds=0.0, expert_seconds=()) for layer in stats.layers))


def train_and_save_adapters(script: Script, base: str | None = None) -> Trained:
    def finish(trainer: Any) -> Tensor:
        trainer.save_model(f"{script.folder}/final")
        return logits_of(trainer.model)

    return train(script, base=base, finish=finish)


def refused_checkpoint(script: Script) -> tuple[str, bool]:
    """The error of the first save, and whether the start has warned of it."""
    from deepspeed.utils import logger

    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        with pytest.raises(CheckpointError) as caught:
            train(script)
    finally:
        logger.removeHandler(handler)
    return str(caught.value), any("the experts are frozen" in warning for warning in warnings)


def train_and_save_afterwards(script: Script) -> dict[str, Tensor]:
    with ds_hybrid.use_with_accelerate():
        trainer = make_trainer(script)
        trainer.train()
    trainer.save_model()
    engine = engine_of(trainer)
    weights = engine.whole_state_dict()
    engine.destroy()
    return weights


def refused(script: Script) -> str:
    with pytest.raises(ConfigError) as caught:
        train(script)
    return str(caught.value)


def train_pretrained(script: Script, base: str) -> Trained:
    return train(script, base=base)

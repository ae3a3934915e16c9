"""Runs of transformers' Trainer on two ranks: schedules, resumption, callbacks, saving and what they write down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset

import ds_hybrid
from ds_hybrid.cli.main import main
from ds_hybrid.hf.trainer import engine_of
from ds_hybrid.observe.run_directory import read_events
from ds_hybrid.placement import ExpertPlacement
from tests.multirank.models import make_model
from tests.multirank.test_rebalancing import EAGER
from tests.multirank.trainers import (
    LORA,
    Script,
    Trained,
    evaluation_loss,
    make_trainer,
    sequences,
    train,
    train_by_hand,
)
from tests.ranks import RankPool

ByHand = tuple[list[float], list[float], dict[str, Tensor]]

MOVED = ExpertPlacement.from_slots([[0, 5, 2, 7], [4, 1, 6, 3]])
HOME = ExpertPlacement.contiguous(8, 2)

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
WARMUP: dict[str, Any] = {"lr_scheduler_type": "linear", "warmup_steps": 2, "max_steps": 5}
LINEAR = [0.0, 0.005, 0.01, 0.01 * 2 / 3, 0.01 / 3]
LOGARITHMIC = [0.0, 0.0, 0.01, 0.01, 0.01]


@pytest.mark.parametrize(
    ("script", "rates"),
    [
        (Script("", accumulation=2, arguments=WARMUP), LINEAR),
        (Script("", zero_stage=2, optimizer_in_file=False, arguments=WARMUP), LINEAR),
        (Script("", scheduler_in_file=True, arguments=WARMUP), LOGARITHMIC),
    ],
    ids=["trainers", "trainers-torchs-optimizer", "files"],
)
def test_schedules(two_ranks: RankPool, tmp_path: Path, script: Script, rates: list[float]) -> None:
    """Every parameter group follows, and training is that of a loop that sets these rates itself."""
    script = replace(script, folder=str(tmp_path))
    trained, (losses, norms, weights) = two_ranks.run(train_both, script, rates)[0]
    for step, of_groups in enumerate(trained.extra):
        assert of_groups == pytest.approx([rates[step]] * len(of_groups), rel=1e-6)
    assert trained.losses == pytest.approx(losses, abs=1e-5)
    assert trained.norms == pytest.approx(norms, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(trained.weights[name], weight, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_weights_in_bf16(two_ranks: RankPool, tmp_path: Path, zero_stage: int) -> None:
    script = Script(str(tmp_path), zero_stage, accumulation=2, bf16=True, arguments=WARMUP)
    trained, (losses, _, weights) = two_ranks.run(train_both, script, LINEAR)[0]
    assert trained.losses == pytest.approx(losses, abs=1e-3)
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        way = (weight - trained.initial[name]).norm()
        assert (trained.weights[name] - weight).norm() < 0.01 * way, name


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_experts_that_have_moved_resume_where_they_were(two_ranks: RankPool, tmp_path: Path, zero_stage: int) -> None:
    script = Script(str(tmp_path), zero_stage, accumulation=2, arguments=SAVING)
    whole = two_ranks.run(train_moving, script, 1)
    resumed = two_ranks.run(run, script, str(tmp_path / "checkpoint-2"))
    for one, other in zip(whole, resumed, strict=True):
        assert one.extra == other.extra == [MOVED] * 2
        assert len(one.losses) == 4
        assert other.losses == one.losses
        assert other.norms[2:] == one.norms[2:]
        assert all(torch.equal(other.weights[name], weight) for name, weight in one.weights.items())


def test_the_best_model_is_loaded_and_training_stops_early(two_ranks: RankPool, tmp_path: Path) -> None:
    """More is called better here, and so the second checkpoint is the best; experts move in the third step."""
    arguments = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 8,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }
    trained = two_ranks.run(train_stopping, Script(str(tmp_path), arguments=arguments))[0]
    first, second, third, fourth, loaded = trained.evaluations  # stopped after two that were no better
    assert second > max(first, third, fourth)
    assert loaded == second
    assert loaded == pytest.approx(evaluation_loss(tmp_path / "checkpoint-2", sequences(7, seed=1)), abs=1e-6)
    assert trained.extra == [[HOME] * 2, [MOVED] * 2, [MOVED] * 2, [HOME] * 2]
    saved = from_pretrained(tmp_path / "checkpoint-2").state_dict()
    assert saved.keys() == trained.weights.keys()
    assert all(torch.equal(value, trained.weights[name]) for name, value in saved.items())


def test_a_checkpoint_in_place_of_gathered_weights_is_exported(two_ranks: RankPool, tmp_path: Path) -> None:
    """What the Trainer falls back to at ZeRO 3, in ``save_model`` and in its checkpoints, with experts that moved."""
    config = Script("", zero_stage=3).ds_config()
    config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = False
    script = Script(str(tmp_path), zero_stage=3, arguments={**SAVING, "deepspeed": config})
    trained = two_ranks.run(train_moving, script, 1)[0]
    make_model("mixtral").config.save_pretrained(tmp_path / "config")  # type: ignore[operator]
    for folder in (tmp_path / "final", tmp_path / "checkpoint-4"):
        assert not list(folder.glob("*.safetensors"))
        out = tmp_path / f"exported-{folder.name}"
        assert main(["export", str(folder), str(out), "--config", str(tmp_path / "config")]) == 0
        exported = from_pretrained(out).state_dict()
        assert exported.keys() == trained.weights.keys()
        assert all(torch.equal(exported[name], weight) for name, weight in trained.weights.items())
    resumed = two_ranks.run(run, script, str(tmp_path / "checkpoint-2"))[0]
    assert resumed.losses == trained.losses


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_gradient_checkpointing_observed_and_rebalanced(two_ranks: RankPool, tmp_path: Path, zero_stage: int) -> None:
    """An epoch is 16 micro-batches of each rank: the sixth step is of one alone, and so the third interval."""
    runs = []
    for checkpointing in (False, True):
        folder = tmp_path / str(checkpointing)
        config = Script("", zero_stage).ds_config()
        config["ds_hybrid"] |= {"observe": {"directory": str(folder), "interval": 2}, "rebalance": EAGER}
        arguments = {"deepspeed": config, "max_steps": 8, "gradient_checkpointing": checkpointing}
        trained = two_ranks.run(run, Script(str(folder), zero_stage, accumulation=3, arguments=arguments))[0]
        events = read_events(folder)
        means = [(one + other) / 2 for one, other in zip(trained.losses[::2], trained.losses[1::2], strict=True)]
        assert [record.step for record in events.steps] == [2, 4, 6, 8]
        assert [record.loss for record in events.steps] == pytest.approx(means, rel=1e-6)
        tokens = [4 * 12 * num_batches for num_batches in (3 + 3, 3 + 3, 3 + 1, 3 + 3)]
        assert [record.tokens for record in events.steps] == tokens
        assert any(record.action == "moved" for record in events.rebalances)
        assert trained.extra != [HOME] * 2
        runs.append((trained, events.steps))
    (plain, steps), (checkpointed, steps_again) = runs
    assert checkpointed.losses == pytest.approx(plain.losses, abs=1e-6)
    assert checkpointed.norms == pytest.approx(plain.norms, rel=1e-5)
    for record, again in zip(steps, steps_again, strict=True):
        for layer, twice in zip(record.layers, again.layers, strict=True):  # backward runs each forward again
            assert sum(twice.wire_bytes.values()) > 1.25 * sum(layer.wire_bytes.values()) > 0
        assert [layer.load for layer in record.layers] == [layer.load for layer in again.layers]


def test_data_that_is_streamed(two_ranks: RankPool, tmp_path: Path) -> None:
    """Rank 0 reads, and sends each rank its batch. Evaluation's seven sequences do not divide."""
    script = Script(str(tmp_path), arguments={"eval_strategy": "steps", "eval_steps": 4, **SAVING})
    trained, (losses, norms, _) = two_ranks.run(train_on_a_stream, script)[0]
    assert trained.losses == pytest.approx(losses, abs=1e-5)
    assert trained.norms == pytest.approx(norms, rel=1e-5)
    expected = evaluation_loss(tmp_path / "checkpoint-4", sequences(7, seed=1))
    assert trained.evaluations == pytest.approx([expected], abs=1e-6)


def test_evaluation_without_training(two_ranks: RankPool, tmp_path: Path) -> None:
    script = Script(str(tmp_path), zero_stage=3)
    make_model("mixtral").save_pretrained(tmp_path / "base")  # type: ignore[operator]
    expected = evaluation_loss(tmp_path / "base", sequences(7, seed=1))
    assert two_ranks.run(evaluate, script, str(tmp_path / "base")) == pytest.approx([expected] * 2, abs=1e-6)


def test_adapters_at_stage_2_in_bf16(two_ranks: RankPool, tmp_path: Path) -> None:
    """The resumed run starts from other adapters on the same model."""
    make_model("mixtral").save_pretrained(tmp_path / "base")  # type: ignore[operator]
    script = Script(str(tmp_path), zero_stage=2, bf16=True, lora=LORA, arguments=SAVING)
    whole = two_ranks.run(run, script, None, str(tmp_path / "base"))[0]
    resumed = two_ranks.run(run, script, str(tmp_path / "checkpoint-2"), str(tmp_path / "base"))[0]
    assert any(not torch.equal(resumed.initial[name], value) for name, value in whole.initial.items())
    assert resumed.losses == whole.losses
    for name, weight in whole.weights.items():
        assert torch.equal(resumed.weights[name], weight)
        assert torch.equal(weight, whole.initial[name].to(weight.dtype)) == ("lora_" not in name), name


def test_frozen_experts_that_have_moved_resume_where_they_were(two_ranks: RankPool, tmp_path: Path) -> None:
    """The Trainer leaves frozen parameters out of the checkpoint; of experts it does not."""
    make_model("mixtral").save_pretrained(tmp_path / "base")  # type: ignore[operator]
    script = Script(str(tmp_path), lora=LORA, arguments=SAVING)
    whole = two_ranks.run(train_moving, script, 1, str(tmp_path / "base"))[0]
    resumed = two_ranks.run(run, script, str(tmp_path / "checkpoint-2"), str(tmp_path / "base"))[0]
    assert whole.extra == resumed.extra == [MOVED] * 2
    assert resumed.losses == whole.losses
    for name, weight in whole.weights.items():
        assert torch.equal(resumed.weights[name], weight), name
        assert torch.equal(weight, whole.initial[name]) == ("lora_" not in name), name


def train_both(
    script: Script, rates: list[float]
) -> tuple[Trained, tuple[list[float], list[float], dict[str, Tensor]]]:
    trained = train_noting_rates(script)
    return trained, train_by_hand(script, trained, rates=rates)


def train_noting_rates(script: Script) -> Trained:
    from transformers import TrainerCallback

    rates: list[list[float]] = []

    class Note(TrainerCallback):
        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append([group["lr"] for group in engine_of(self.trainer).optimizer.param_groups])

    return train(script, prepare=lambda trainer: trainer.add_callback(Note(trainer)), finish=lambda _: rates)


def from_pretrained(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def placements_of(trainer: Any) -> list[ExpertPlacement]:
    return [layer.placement for layer in engine_of(trainer).moe_layers_by_name().values()]


def train_moving(script: Script, at_step: int, base: str | None = None) -> Trained:
    def finish(trainer: Any) -> list[ExpertPlacement]:
        trainer.save_model(f"{script.folder}/final")
        return placements_of(trainer)

    def prepare(trainer: Any) -> None:
        trainer.add_callback(move_at(trainer, at_step))

    return train(script, base=base, prepare=prepare, finish=finish)


def move_at(trainer: Any, step: int) -> Any:
    from transformers import TrainerCallback

    class Move(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step:
                engine = engine_of(trainer)
                engine.move_experts(dict.fromkeys(engine.moe_layers_by_name(), MOVED))

    return Move()


def run(script: Script, resume: str | None = None, base: str | None = None) -> Trained:
    """Ends with the placements. What is resumed starts from other weights, which the checkpoint replaces."""
    return train(script, seed=5 if resume else 0, base=base, resume=resume, finish=placements_of)


def train_stopping(script: Script) -> Trained:
    """Ends with the placements at the second, third and fourth evaluation, and at the end."""
    from transformers import EarlyStoppingCallback, TrainerCallback

    placements: list[list[ExpertPlacement]] = []

    class Note(TrainerCallback):
        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            placements.append(placements_of(self.trainer))

    def prepare(trainer: Any) -> None:
        trainer.add_callback(move_at(trainer, 3))
        trainer.add_callback(Note(trainer))
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))

    def finish(trainer: Any) -> list[list[ExpertPlacement]]:
        trainer.evaluate()
        return placements[1:]

    return train(script, prepare=prepare, finish=finish)


def train_on_a_stream(script: Script) -> tuple[Trained, ByHand]:
    rows = sequences(64)

    def prepare(trainer: Any) -> None:
        trainer.train_dataset = Stream(rows)
        trainer.eval_dataset = Stream(sequences(7, seed=1))

    trained = train(script, prepare=prepare)
    starts = range(2 * dist.get_rank(), 4 * len(trained.losses), 4)
    batches = [{name: torch.stack([row[name] for row in rows[s : s + 2]]) for name in rows[0]} for s in starts]
    return trained, train_by_hand(script, replace(trained, batches=batches))


class Stream(IterableDataset[dict[str, Tensor]]):
    """Rows in their order, without a length."""

    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self._rows)


def evaluate(script: Script, base: str) -> float:
    with ds_hybrid.use_with_accelerate():
        trainer = make_trainer(script, base=base)
        loss = trainer.evaluate()["eval_loss"]
        engine_of(trainer).destroy()
    return float(loss)

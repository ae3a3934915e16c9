"""transformers' Trainer and plain Accelerate on two ranks with two expert-parallel places, through ds_hybrid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ds_hybrid
from ds_hybrid.engine.engine import MoEEngine
from ds_hybrid.errors import ConfigError, PlacementError
from ds_hybrid.hf.trainer import engine_of
from ds_hybrid.placement import ExpertPlacement
from tests.multirank.models import make_model
from tests.multirank.trainers import (
    LAYERS,
    LORA,
    Script,
    Trained,
    evaluation_loss,
    forget_accelerate,
    logits_of,
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


def test_layers_are_logged(two_ranks: RankPool, tmp_path: Path) -> None:
    trained = two_ranks.run(train_logging, Script(str(tmp_path)))[0]
    entries = [log for log in trained.logs if "moe_load_max_over_mean" in log]
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4]
    assert len(trained.losses) == 4
    for entry in entries:
        assert 1 <= entry["moe_load_max_over_mean"] <= 4  # top-2 of 8 experts
        assert 1 <= entry["moe_lower_bound_ratio"] < 1.5
        assert entry["moe_wire_bytes_per_token"] > 0


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
    """Checkpoints are not: DeepSpeed has no place for frozen experts in those of stage 3."""
    script = Script(str(tmp_path), zero_stage=3, lora=LORA)
    trained = two_ranks.run(train_and_save_adapters, script, str(make_base(tmp_path)))[0]
    plain = two_ranks.run(train, replace(script, zero_stage=1))[0]
    assert trained.losses == pytest.approx(plain.losses, abs=1e-5)
    assert (tmp_path / "final" / "adapter_model.safetensors").stat().st_size > 0


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
        assert LAYERS[0] in message


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_weights_that_transformers_loads_for_stage_3(two_ranks: RankPool, tmp_path: Path, zero_stage: int) -> None:
    """``from_pretrained`` after TrainingArguments parts them over the ranks before the engine sees them."""
    script = Script(str(tmp_path), zero_stage)
    trained = two_ranks.run(train_pretrained, script, str(make_base(tmp_path)))[0]
    plain = two_ranks.run(train, Script(str(tmp_path)))[0]
    assert trained.losses == pytest.approx(plain.losses, abs=1e-5)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_plain_accelerate(two_ranks: RankPool, tmp_path: Path, zero_stage: int) -> None:
    from transformers import AutoModelForCausalLM

    first, second = two_ranks.run(loop_of_accelerate, zero_stage, str(tmp_path))
    assert first.losses == second.losses
    assert first.after_loading == first.losses[2:]
    assert first.names == sorted(make_model("mixtral").state_dict())
    assert second.names == []
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    torch.testing.assert_close(logits_of(model), first.logits, rtol=0, atol=1e-5)


def test_switched_off_it_is_deepspeeds_engine_again(two_ranks: RankPool) -> None:
    assert two_ranks.run(engines_on_and_off) == [[MoEEngine, deepspeed.DeepSpeedEngine]] * 2


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
    from ds_hybrid.hf.callback import LogMoEStats

    return train(script, prepare=lambda trainer: trainer.add_callback(LogMoEStats(trainer)))


def train_and_save_adapters(script: Script, base: str | None = None) -> Trained:
    def finish(trainer: Any) -> Tensor:
        trainer.save_model(f"{script.folder}/final")
        return logits_of(trainer.model)

    return train(script, base=base, finish=finish)


def refused(script: Script) -> str:
    with pytest.raises(ConfigError) as caught:
        train(script)
    return str(caught.value)


def train_pretrained(script: Script, base: str) -> Trained:
    return train(script, base=base)


@dataclass(frozen=True)
class Loop:
    losses: list[float]
    after_loading: list[float]
    names: list[str]
    logits: Tensor


def loop_of_accelerate(zero_stage: int, folder: str) -> Loop:
    """4 steps; then 2 of them again, from the state in between."""
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from accelerate.utils import DummyOptim
    from torch.utils.data import DataLoader

    config = Script(folder, zero_stage).ds_config()
    config["bf16"]["enabled"] = False
    config["optimizer"]["params"] |= {"betas": [0.9, 0.999], "eps": 1e-8}
    forget_accelerate()
    with ds_hybrid.use_with_accelerate():
        PartialState(cpu=True)  # on CPUs: alone, Accelerate would take each rank for a run of its own
        accelerator = Accelerator(
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config, transformer_moe_cls_names="MixtralSparseMoeBlock")
        )
        model = make_model("mixtral")
        engine, optimizer, loader = accelerator.prepare(
            model,
            DummyOptim(list(model.parameters()), lr=0.01),
            DataLoader(sequences(16), batch_size=2),  # type: ignore[arg-type]
        )
        assert engine_of(accelerator) is engine

        def step(batch: dict[str, Tensor]) -> float:
            loss = engine(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return float(accelerator.gather(loss.detach()).mean())

        batches = list(loader)
        losses = [step(batch) for batch in batches[:2]]
        accelerator.save_state(f"{folder}/state")
        losses += [step(batch) for batch in batches[2:]]
        accelerator.load_state(f"{folder}/state")
        again = [step(batch) for batch in batches[2:]]
        state = accelerator.get_state_dict(engine)
        names = sorted(state)
        accelerator.unwrap_model(engine).save_pretrained(
            f"{folder}/model", is_main_process=accelerator.is_main_process, state_dict=state
        )
        logits = logits_of(engine)
    engine.destroy()
    dist.barrier()
    return Loop(losses, again, names, logits)


def engines_on_and_off() -> list[type]:
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    kinds = []
    switch = ds_hybrid.use_with_accelerate()
    for _ in range(2):
        forget_accelerate()
        PartialState(cpu=True)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}}
        engine = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)).prepare(torch.nn.Linear(2, 2))
        kinds.append(type(engine))
        engine.destroy()
        switch.off()
    return kinds

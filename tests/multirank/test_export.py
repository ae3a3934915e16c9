"""What is exported computes what the engine computed, from any ZeRO stage, any ranks and any places of the experts."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hybrid
from ds_hybrid.errors import CheckpointError
from ds_hybrid.hf.export import export
from ds_hybrid.hf.whole_model import whole_state_dict
from ds_hybrid.placement import ExpertPlacement
from tests.multirank import explicit
from tests.multirank.models import CONFIGS, VOCABULARY, is_known, make_model
from tests.multirank.test_expert_groups import other_groups
from tests.multirank.training import Run, batch, gather_parameters
from tests.ranks import RankPool

GATHER = {"stage3_gather_16bit_weights_on_model_save": True}


@dataclass(frozen=True)
class Saved:
    """What a run has left: its logits, and its parameters by the plain model's names, experts in logical order."""

    logits: Tensor
    parameters: dict[str, Tensor]
    was_saved: bool


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_preset_comes_back(four_ranks: RankPool, tmp_path: Path, model_type: str) -> None:
    if not is_known(model_type):
        pytest.skip("not in this transformers")
    run = Run(model_type=model_type, num_steps=2)
    saved = four_ranks.run(train_and_save, run, str(tmp_path))[0]
    compare(saved, exported(tmp_path, model_type))
    compare(saved, from_16bit(tmp_path, model_type))


@pytest.mark.parametrize(
    ("zero_stage", "ep_size", "tied"), [(0, 2, False), (1, 4, True), (2, 1, False), (3, 2, True), (3, 4, False)]
)
def test_every_stage_and_size(four_ranks: RankPool, tmp_path: Path, zero_stage: int, ep_size: int, tied: bool) -> None:
    options = GATHER if zero_stage == 3 else {"round_robin_gradients": zero_stage == 2}
    run = Run(zero_stage=zero_stage, ep_size=ep_size, num_steps=2, zero_options=options)
    saved = four_ranks.run(train_and_save, run, str(tmp_path), tied)[0]
    model = exported(tmp_path, "qwen3_moe", tied=tied)
    compare(saved, model)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    compare(saved, from_16bit(tmp_path, "qwen3_moe", tied=tied))


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_values_come_from_the_masters(four_ranks: RankPool, tmp_path: Path, zero_stage: int) -> None:
    """They are more than bf16 tells, and round to the weights that the run had."""
    run = Run(zero_stage=zero_stage, bf16=True, num_steps=2, zero_options=GATHER if zero_stage == 3 else {})
    saved = four_ranks.run(train_and_save, run, str(tmp_path))[0]
    values = exported(tmp_path, "qwen3_moe").state_dict()
    for name, weight in saved.parameters.items():
        assert torch.equal(values[name].bfloat16(), weight), name
        assert not torch.equal(values[name], weight.float()), name
    out = exported(tmp_path, "qwen3_moe", dtype=torch.bfloat16, max_shard_size="20KB").state_dict()
    assert all(torch.equal(out[name], weight) for name, weight in saved.parameters.items())


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_named_groups_lead_to_the_masters(four_ranks: RankPool, tmp_path: Path, zero_stage: int) -> None:
    run = Run(zero_stage=zero_stage, num_steps=2, expert_groups=[[0, 3], [1, 2]], zero_options=GATHER)
    saved = four_ranks.run(in_other_groups, run, str(tmp_path))[0]
    compare(saved, exported(tmp_path, "qwen3_moe"))
    if zero_stage == 1:
        edit_record(tmp_path, expert_groups={"ep_size_2": [[0, 1], [2, 3]]})
        with pytest.raises(CheckpointError, match="other ranks held these experts"):
            whole_state_dict(tmp_path)


def test_two_records_of_one_placement_must_agree(four_ranks: RankPool, tmp_path: Path) -> None:
    saved = four_ranks.run(train_and_save, Run(num_steps=1), str(tmp_path))[0]
    right = {name: placement_of(8, 2, name).expert_of_slot.tolist() for name in LAYERS}
    edit_record(tmp_path, placements=right)
    compare(saved, exported(tmp_path, "qwen3_moe"))
    for placements, message in [
        ({**right, LAYERS[0]: [[0, 1, 2, 3], [4, 5, 6, 7]]}, f"placements of {LAYERS[0]} is .* files say"),
        ({"elsewhere": right[LAYERS[0]]}, "placements names elsewhere"),
    ]:
        edit_record(tmp_path, placements=placements)
        with pytest.raises(CheckpointError, match=message):
            whole_state_dict(tmp_path)
    record_path(tmp_path).unlink()  # as DeepSpeed alone leaves it: its own description is enough
    compare(saved, exported(tmp_path, "qwen3_moe"))


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_frozen_parameters_are_there(four_ranks: RankPool, tmp_path: Path, zero_stage: int) -> None:
    run = Run(zero_stage=zero_stage, trained=("experts", "lm_head"), num_steps=2, zero_options=GATHER)
    saved = four_ranks.run(train_and_save, run, str(tmp_path))[0]
    compare(saved, exported(tmp_path, "qwen3_moe"))
    assert torch.load(tmp_path / "trained.bin").keys() == {
        name for name in saved.parameters if any(part in name for part in run.trained)
    }


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_explicit_layers(four_ranks: RankPool, tmp_path: Path, zero_stage: int, bf16: bool) -> None:
    """DeepSpeed's own zero_to_fp32 cannot read such a checkpoint."""
    setup = explicit.Setup(zero_stage=zero_stage, bf16=bf16, ep_size=2, learning_rate=0.03)
    outputs = four_ranks.run(train_explicit, setup, str(tmp_path))
    edit_record(tmp_path, placements={"moe": EXPLICIT.expert_of_slot.tolist()})
    state = whole_state_dict(tmp_path)
    assert {value.dtype for value in state.values()} == {torch.float32}
    own = torch.load(tmp_path / "pytorch_model.bin")
    assert own.keys() == state.keys()
    for name, value in own.items():
        assert torch.equal(state[name].to(value.dtype), value), name
        assert bf16 != torch.equal(state[name], value.float()), name
    toy = explicit.Toy(setup, ep_size=1)
    toy.load_state_dict(own if bf16 else state)
    tokens = explicit.batch(setup, 9, 0, 0)
    toy.eval().to(torch.bfloat16 if bf16 else torch.float32)
    output = toy(tokens.bfloat16() if bf16 else tokens)[0]
    torch.testing.assert_close(output, outputs[0], rtol=0, atol=0.05 if bf16 else 1e-6)
    export(tmp_path, tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"model.safetensors"}


def test_without_permission_stage_3_saves_nothing(four_ranks: RankPool, tmp_path: Path) -> None:
    run = Run(zero_stage=3, num_steps=1)
    assert not any(saved.was_saved for saved in four_ranks.run(train_and_save, run, str(tmp_path)))
    assert not (tmp_path / "pytorch_model.bin").exists()


def test_tensor_parallel_weights_are_joined_and_training_goes_on(four_ranks: RankPool, tmp_path: Path) -> None:
    """The last ones here: DeepSpeed keeps the tensor-parallel groups for what the process builds later."""
    for zero_stage, ep_size in [(1, 4), (0, 2), (3, 2), (2, 2)]:
        folder = tmp_path / f"{zero_stage}_{ep_size}"
        run = Run(zero_stage=zero_stage, ep_size=ep_size, tp_size=2, num_steps=2, zero_options=GATHER)
        saved, (with_save, without) = four_ranks.run(train_on, run, str(folder))[0]
        compare(saved, from_16bit(folder, "qwen3_moe"))
        compare(saved, exported(folder, "qwen3_moe"))
        assert with_save.keys() == without.keys()
        assert all(torch.equal(with_save[name], without[name]) for name in without)


LAYERS = ("model.layers.0.mlp", "model.layers.1.mlp")
EXPLICIT = ExpertPlacement.from_slots([[3, 0], [2, 1]])


def placement_of(num_experts: int, ep_size: int, layer: str) -> ExpertPlacement:
    """Another one for each layer."""
    generator = np.random.default_rng(len(layer) + sum(map(ord, layer)))
    return ExpertPlacement.from_slots(generator.permutation(num_experts).reshape(ep_size, -1))


def train_and_save(run: Run, folder: str, tied: bool = False) -> Saved:
    """A run whose experts are elsewhere from the start: the plain model's are permuted, then ``place`` says so."""
    engine = moved_engine(run, tied=tied)
    _train(engine, range(run.num_steps))
    return save(engine, folder)


def in_other_groups(run: Run, folder: str) -> Saved:
    with other_groups():
        return train_and_save(run, folder)


def train_on(run: Run, folder: str) -> tuple[Saved, list[dict[str, Tensor]]]:
    """What is saved at step 2, and the parameters at step 3 with and without a save in between."""
    parameters = []
    for path in (folder, None):
        engine = moved_engine(run)
        _train(engine, range(2), run.tp_size)
        if path is not None:
            saved = save(engine, path, destroy=False)
            engine.train()
        _train(engine, range(2, 3), run.tp_size)
        parameters.append(gather_parameters(engine.module))
        engine.destroy()
    return saved, parameters


def save(engine: Any, folder: str, *, destroy: bool = True) -> Saved:
    engine.save_checkpoint(folder)
    was_saved = engine.save_16bit_model(folder)
    engine.save_16bit_model(folder, "other.safetensors")
    engine.save_16bit_model(folder, "trained.bin", exclude_frozen_parameters=True)
    engine.eval()
    with torch.no_grad():
        logits = engine(input_ids=_ids()).logits
    parameters = gather_parameters(engine.module)
    for name, layer in engine.moe_layers_by_name().items():
        order = torch.from_numpy(layer.placement.expert_of_slot.flatten())
        for key in (f"{name}.experts.gate_up_proj", f"{name}.experts.down_proj"):
            parameters[key] = torch.empty_like(parameters[key]).index_copy_(0, order, parameters[key])
    if destroy:
        engine.destroy()
    return Saved(logits, parameters, was_saved)


def moved_engine(run: Run, *, tied: bool = False) -> Any:
    model = plain_model(run.model_type, tied=tied)
    with torch.no_grad():
        for name, block in model.named_modules():
            if hasattr(getattr(block, "experts", None), "gate_up_proj"):
                order = placement_of(8, run.ep_size, name).expert_of_slot.flatten()
                for weight in (block.experts.gate_up_proj, block.experts.down_proj):
                    weight.copy_(weight[order])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in run.trained))
    engine = ds_hybrid.initialize(model=model, model_parameters=model.parameters(), config=run.ds_config())[0]
    for name, layer in engine.moe_layers_by_name().items():
        layer.place(placement_of(8, run.ep_size, name))
    return engine


def plain_model(model_type: str, *, tied: bool = False) -> nn.Module:
    model = make_model(model_type, tie_word_embeddings=tied)
    torch.manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # zeros would hide that it is lost
            buffer.normal_()
    return model


def train_explicit(setup: explicit.Setup, folder: str) -> Tensor:
    toy, whole = explicit.Toy(setup), explicit.Toy(setup, ep_size=1)
    place = dist.get_rank() % setup.ep_size
    for expert, logical in zip(_explicit_experts(toy), EXPLICIT.expert_of_slot[place], strict=True):
        expert.load_state_dict(_explicit_experts(whole)[logical].state_dict())
    engine = explicit.make_engine(setup, toy)
    engine.module.moe.place(EXPLICIT)
    cast = partial(torch.Tensor.to, dtype=torch.bfloat16 if setup.bf16 else torch.float32)
    for step in range(2):
        engine.backward(explicit.loss_of(setup, engine(cast(explicit.batch(setup, step, dist.get_rank(), 0)))))
        engine.step()
    engine.save_checkpoint(folder)
    assert engine.save_16bit_model(folder)
    engine.eval()
    output: Tensor = engine(cast(explicit.batch(setup, 9, 0, 0)))[0].detach()
    engine.destroy()
    return output


def _explicit_experts(toy: explicit.Toy) -> nn.ModuleList:
    experts: nn.ModuleList = toy.moe.deepspeed_moe.experts.deepspeed_experts
    return experts


def _train(engine: Any, steps: range, tp_size: int = 1) -> None:
    for step in steps:
        ids = batch(step, dist.get_rank() // tp_size)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def _ids() -> Tensor:
    return torch.arange(24).reshape(2, 12) * 7 % VOCABULARY


def exported(folder: Path, model_type: str, *, tied: bool = False, **options: Any) -> Any:
    """The exported model, as transformers loads it."""
    from transformers import AutoModelForCausalLM

    out, config = folder / "out", folder / "model"
    shutil.rmtree(out, ignore_errors=True)
    plain_model(model_type, tied=tied).config.save_pretrained(config)  # type: ignore[union-attr, operator]
    export(folder, out, config=config, **options)
    return AutoModelForCausalLM.from_pretrained(out, dtype="auto", attn_implementation="eager").eval()


def from_16bit(folder: Path, model_type: str, *, tied: bool = False) -> Any:
    """The plain model with what ``save_16bit_model`` has written; both formats hold the same."""
    from safetensors.torch import load_file

    model = plain_model(model_type, tied=tied)
    state, other = torch.load(folder / "pytorch_model.bin"), load_file(folder / "other.safetensors")
    model.load_state_dict(state)
    assert state.keys() - other.keys() == ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(state[name], other[name]) for name in other)
    return model.eval()


def compare(saved: Saved, model: Any) -> None:
    with torch.no_grad():
        logits = model(input_ids=_ids()).logits
    assert (logits - saved.logits).abs().max() < 1e-6 * max(1.0, float(saved.logits.abs().max()))
    parameters = dict(model.named_parameters())
    assert parameters.keys() == saved.parameters.keys()
    for name, expected in saved.parameters.items():
        assert torch.equal(parameters[name], expected), name


def record_path(folder: Path) -> Path:
    return folder / (folder / "latest").read_text().strip() / "ds_hybrid.json"


def edit_record(folder: Path, **changes: Any) -> None:
    path = record_path(folder)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

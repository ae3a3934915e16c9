"""What an export needs and leaves. That its values are right is tested over real runs in tests/multirank/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from ds_hybrid.errors import CheckpointError
from ds_hybrid.hf.export import export
from tests.multirank.models import make_model

MODEL = "qwen3_moe"


def write_checkpoint(folder: Path, *, is_converted: bool, dropped: str | None = None) -> dict[str, Tensor]:
    """What an fp32 run without ZeRO on one rank leaves; its state dict."""
    model = make_model(MODEL)
    state = dict(model.state_dict())
    module = {name: value for name, value in state.items() if name != dropped}
    layers = []
    tag = folder / "step1"
    tag.mkdir(parents=True)
    for index in range(2 if is_converted else 0):
        path = f"model.layers.{index}.mlp"
        w1, w3 = module.pop(f"{path}.experts.gate_up_proj").chunk(2, dim=1)
        w2 = module.pop(f"{path}.experts.down_proj")
        module[f"{path}.router.gate.weight"] = module.pop(f"{path}.gate.weight")
        layers.append({"moe_layer_id": index, "module_path": path, "num_experts": 8, "num_local_experts": 8})
        for slot in range(8):
            weights = {f"{path}.experts.{name}.{slot}": w[slot] for name, w in (("w1", w1), ("w2", w2), ("w3", w3))}
            torch.save(weights, tag / f"layer_{index}_expert_{slot}_mp_rank_00_model_states.pt")
    content = {
        "module": module,
        "buffer_names": [],
        "param_shapes": None,
        "ds_config": {"expert_parallel": {"enabled": True, "autoep_size": 1}},
        "dp_world_size": 1,
        "mp_world_size": 1,
        "num_experts": [8, 8],
        "ds_autoep_layers": layers or None,
    }
    torch.save(content, tag / "mp_rank_00_model_states.pt")
    (folder / "latest").write_text("step1")
    return state


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    make_model(MODEL).config.save_pretrained(folder)  # type: ignore[union-attr, operator]
    return folder


def test_shards_config_generation_config_and_tokenizer(tmp_path: Path, config: Path) -> None:
    state = write_checkpoint(tmp_path / "run", is_converted=True)
    GenerationConfig(max_new_tokens=7).save_pretrained(config)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")))
    words.save_pretrained(tmp_path / "words")
    out = tmp_path / "deep" / "out"
    export(
        tmp_path / "run",
        out,
        config=config / "config.json",
        tokenizer=tmp_path / "words",
        dtype=torch.bfloat16,
        max_shard_size="50KB",
    )
    assert (out / "model.safetensors.index.json").is_file()
    assert all(path.stat().st_size < 60_000 for path in out.glob("*.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.max_new_tokens == 7
    assert AutoTokenizer.from_pretrained(out).get_vocab() == {"a": 0, "b": 1}
    assert all(torch.equal(value, state[name].bfloat16()) for name, value in model.state_dict().items())


def test_a_config_in_the_checkpoint_is_found(tmp_path: Path, config: Path) -> None:
    write_checkpoint(tmp_path / "run", is_converted=True)
    (config / "config.json").rename(tmp_path / "run" / "config.json")
    export(tmp_path / "run", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


def test_own_names_where_nothing_was_converted(tmp_path: Path) -> None:
    state = write_checkpoint(tmp_path / "run", is_converted=False)
    export(tmp_path / "run", tmp_path / "out")
    values = load_file(tmp_path / "out" / "model.safetensors")
    assert values.keys() == state.keys()
    assert all(torch.equal(values[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"run/config.json: no such file, and the names of the experts depend on the model. Give --config"),
        ({"config": "none"}, r"none: no such file. --config takes a Hugging Face model's config.json or folder."),
        ({"config": "bad.json"}, r"bad.json: transformers .* cannot build the model"),
        ({"config": "model", "tokenizer": "none"}, r"none: no such folder. Name the one that holds the tokenizer"),
        ({"config": "model", "tag": "step9"}, r"step9: no such tag. Tags in .*: step1."),
        ({"config": "model", "out": "run"}, r"run: exists, and is not an empty folder. Name a new one."),
    ],
)
def test_what_is_missing(tmp_path: Path, config: Path, arguments: dict[str, Any], message: str) -> None:
    write_checkpoint(tmp_path / "run", is_converted=True)
    (tmp_path / "bad.json").write_text('{"model_type": "no_such_model"}')
    paths = {key: tmp_path / value if key != "tag" else value for key, value in {"out": "out", **arguments}.items()}
    with pytest.raises(CheckpointError, match=message):
        export(tmp_path / "run", **paths)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_another_model(tmp_path: Path, config: Path) -> None:
    write_checkpoint(tmp_path / "run", is_converted=True, dropped="model.norm.weight")
    make_model(MODEL, num_hidden_layers=3).config.save_pretrained(tmp_path / "deeper")  # type: ignore[union-attr, operator]
    for folder, message in [
        (config, r"not a checkpoint of this Qwen3MoeForCausalLM: it lacks model.norm.weight \(three of each"),
        (tmp_path / "deeper", r"it lacks model.layers.2.input_layernorm.weight, model.layers.2.mlp"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            export(tmp_path / "run", tmp_path / "out", config=folder)


def test_a_checkpoint_with_adapters_is_told_as_one(tmp_path: Path, config: Path) -> None:
    write_checkpoint(tmp_path / "run", is_converted=False)
    path = tmp_path / "run" / "step1" / "mp_rank_00_model_states.pt"
    content = torch.load(path)
    content["module"] = {f"base_model.model.{name}": value for name, value in content["module"].items()}
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"step1: holds adapters of PEFT around the model \(base_model\.model\."):
        export(tmp_path / "run", tmp_path / "out", config=config)
    assert not (tmp_path / "out").exists()

"""The models that launch/train.py makes."""

from pathlib import Path

import pytest
import torch
from models import NUM_BYTES, TINY_MODELS, build_model, model_config

from ds_hybrid.errors import ConfigError


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_model_from_its_saved_config_has_the_same_weights_and_reads_bytes(name: str, tmp_path: Path) -> None:
    config = model_config(name, seq_len=16)
    config.save_pretrained(tmp_path)
    model = build_model(config, seed=1)
    for path in (tmp_path, tmp_path / "config.json"):
        again = build_model(model_config(str(path), seq_len=16), seed=1)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert model(input_ids=torch.arange(NUM_BYTES)[None]).logits.shape == (1, NUM_BYTES, NUM_BYTES)


def test_another_seed_gives_other_weights() -> None:
    config = model_config("tiny_qwen3_moe", seq_len=16)
    first, second = (build_model(config, seed).get_input_embeddings().weight for seed in (0, 1))
    assert not torch.equal(first, second)


def test_what_a_user_can_get_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(
        ConfigError, match=rf"^--model {path}: neither a name nor a file\. Give one of tiny_qwen3_moe, "
    ):
        model_config(str(path), seq_len=16)
    path.write_text('{"model_type": "no_such"}')
    with pytest.raises(ConfigError, match=rf"^--model {path}: transformers cannot read this config: .*no_such"):
        model_config(str(path), seq_len=16)
    path.write_text('{"model_type": "mixtral", "vocab_size": 64}')
    with pytest.raises(ConfigError, match=r"vocab_size = 64, but bytes take 256\. Set vocab_size to 256 or more"):
        model_config(str(path), seq_len=16)
    with pytest.raises(ConfigError, match="max_position_embeddings = 4096, but --seq-len takes 5000"):
        model_config("tiny_mixtral", seq_len=5000)

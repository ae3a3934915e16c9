"""transformers' calls become calls of the core: what a query sees, learned once a batch; what is not known refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_hybrid.attention.choose import Schedule
from ds_hybrid.attention.hugging_face import (
    SharedAttention,
    WindowedMask,
    padding_alone,
    refuse_model,
    switch_attention,
)
from ds_hybrid.attention.kv_gather import KVGatherAttention
from ds_hybrid.attention.masks import MaskRule, Sight
from ds_hybrid.dispatch.collectives import LoneRank
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.errors import ConfigError
from tests.multirank.models import make_model


class Recorder:
    """In the place of KVGatherAttention, on one rank: keeps what it is called with."""

    def __init__(self) -> None:
        self.group = CountingRank(Meter())
        self.sights: list[Sight] = []
        self.options: list[dict[str, Any]] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sight: Sight, **options: Any) -> Tensor:
        self.sights.append(sight)
        self.options.append(options)
        return query.new_zeros((*query.shape[:3], value.shape[3]))


class CountingRank(LoneRank):
    num_gathers = 0

    def all_gather_metadata(self, tensor: Tensor) -> Tensor:
        self.num_gathers += 1
        return super().all_gather_metadata(tensor)


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
QUERY, KEY, VALUE = torch.ones(2, 4, 6, 8), torch.ones(2, 2, 6, 8), torch.ones(2, 2, 6, 5)


def call(attention: SharedAttention, module: nn.Module | None = None, **changes: Any) -> tuple[Tensor, None]:
    arguments = {
        "query": QUERY,
        "key": KEY,
        "value": VALUE,
        "attention_mask": None,
        "scaling": 0.5,
        "position_ids": POSITIONS,
        **changes,
    }
    return attention(module or nn.Identity(), **arguments)


def test_layers_of_a_batch_learn_once_what_is_seen() -> None:
    recorder = Recorder()
    attention = SharedAttention(recorder)  # type: ignore[arg-type]
    mask = torch.ones(2, 6, dtype=torch.bool)
    output, weights = call(attention)
    call(attention)
    call(attention, sliding_window=3)
    assert output.shape == (2, 6, 4, 5)
    assert weights is None
    assert recorder.group.num_gathers == 1
    assert recorder.sights[0] is recorder.sights[1] is not recorder.sights[2]
    assert recorder.sights[2].rule == MaskRule(causal=True, window=3)
    assert recorder.options[0] == {"scale": 0.5, "dropout": 0.0}
    call(attention, attention_mask=mask)
    call(attention, attention_mask=mask)
    assert recorder.group.num_gathers == 2
    mask[0, 5] = False  # the same tensor, other padding
    call(attention, attention_mask=mask)
    assert recorder.group.num_gathers == 3


def test_documents_and_padding() -> None:
    recorder = Recorder()
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]]).bool()
    call(SharedAttention(recorder), attention_mask=mask)  # type: ignore[arg-type]
    assert recorder.sights[0]._documents is not None
    assert recorder.sights[0]._documents.tolist() == [[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, 0, 0]]


def test_one_row_of_positions_stands_for_all() -> None:
    recorder = Recorder()
    call(SharedAttention(recorder), position_ids=POSITIONS[1:])  # type: ignore[arg-type]
    assert recorder.sights[0].num_rows == 1


@pytest.mark.parametrize(
    ("of_module", "argument", "causal"), [(False, None, False), (True, None, True), (True, False, False)]
)
def test_the_layer_says_whether_it_is_causal(of_module: bool, argument: bool | None, causal: bool) -> None:
    recorder, module = Recorder(), nn.Identity()
    module.is_causal = of_module  # type: ignore[assignment]
    call(SharedAttention(recorder), module, is_causal=argument)  # type: ignore[arg-type]
    assert recorder.sights[0].rule.causal is causal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"softcap": 30.0}, "Identity gives its attention softcap, which is not known here. "),
        ({"s_aux": torch.ones(4)}, "Identity gives its attention s_aux, which is not known here. "),
        ({"query": QUERY[:, :, :1]}, "1 queries and 6 keys: text is generated from a cache. "),
        ({"position_ids": None}, "position_ids are none: must be [B, 6], those of this rank's shard. "),
        ({"position_ids": POSITIONS.expand(3, 2, 6)}, "position_ids are [3, 2, 6]: must be [B, 6], "),
        ({"attention_mask": torch.ones(2, 1, 6, 6)}, "attention_mask [2, 1, 6, 6]: must be [B, L], 0 at padding; "),
        ({"position_ids": POSITIONS * 2}, "the position_ids of the ranks do not make one sequence: "),
    ],
)
def test_what_is_not_known_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        call(SharedAttention(Recorder()), **changes)  # type: ignore[arg-type]
    assert str(error.value).startswith(f"ds_hybrid.attention.kv_gather: {message}")


def test_no_mask_of_pairs_is_made() -> None:
    padding = torch.ones(2, 6, dtype=torch.bool)
    assert padding_alone(batch_size=2, q_length=6, kv_length=6, attention_mask=padding) is padding
    assert padding_alone(batch_size=2) is None
    assert padding_alone(attention_mask=padding, local_size=5) == WindowedMask(padding, 5)
    with pytest.raises(ConfigError, match="masks pairs of tokens by a rule of its own"):
        padding_alone(use_vmap=True)


def test_a_model_inside_a_module_is_found() -> None:
    refuse_model(nn.Sequential(nn.Linear(2, 2), make_model("qwen3_moe")))
    with pytest.raises(ConfigError, match="Sequential holds no Hugging Face model"):
        refuse_model(nn.Sequential(nn.Linear(2, 2)))


def test_attention_that_is_not_from_the_registry() -> None:
    model: Any = make_model("mixtral")
    model._can_set_attn_implementation = lambda: False
    with pytest.raises(ConfigError, match="the attention of MixtralForCausalLM cannot be switched"):
        refuse_model(model)


def test_soft_capped_scores() -> None:
    model: Any = make_model("mixtral")
    model.config.attn_logit_softcapping = 30.0
    with pytest.raises(ConfigError, match="has attn_logit_softcapping"):
        refuse_model(model)


def test_a_whole_batch_on_every_rank_is_refused() -> None:
    """Its positions, put together as if they were shards, only restart, but not at 0."""
    together = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]])
    wide = {"query": torch.ones(1, 4, 16, 8), "key": torch.ones(1, 2, 16, 8), "value": torch.ones(1, 2, 16, 8)}
    with pytest.raises(ConfigError, match="give the model those, not the whole batch"):
        call(SharedAttention(Recorder()), position_ids=together, **wide)  # type: ignore[arg-type]


def test_a_hole_hides_itself_alone() -> None:
    recorder = Recorder()
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 0, 1, 1, 0, 1]]).bool()
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 1, 2]])
    call(SharedAttention(recorder), attention_mask=mask, position_ids=positions)  # type: ignore[arg-type]
    assert recorder.sights[0]._documents is not None
    assert recorder.sights[0]._documents.tolist() == [[0, 0, -1, -1, 0, 0], [0, -1, 1, 1, -1, 1]]


def test_batches_made_for_inference() -> None:
    recorder = Recorder()
    with torch.inference_mode():
        positions = POSITIONS.clone()
        attention = SharedAttention(recorder)  # type: ignore[arg-type]
        call(attention, position_ids=positions)
        call(attention, position_ids=positions)
    assert recorder.group.num_gathers == 1


@pytest.mark.parametrize("padded", [False, True])
def test_a_window_that_only_the_mask_knows(padded: bool) -> None:
    """Qwen2-MoE tells its attention nothing of it. One layer of two slides."""
    import transformers

    config = transformers.Qwen2MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        shared_expert_intermediate_size=8, initializer_range=0.3, use_cache=False, use_sliding_window=True,
        sliding_window=5, layer_types=["full_attention", "sliding_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen2MoeForCausalLM(config).eval()
    ids = torch.randint(0, 32, (2, 16))
    mask = torch.ones(2, 16, dtype=torch.bool)
    mask[0, 13:] = False
    batch = {"input_ids": ids, "position_ids": torch.arange(16)[None], "attention_mask": mask if padded else None}
    with torch.no_grad():
        model.set_attn_implementation("eager")
        expected = model(**batch).logits
        refuse_model(model)
        lone = KVGatherAttention(LoneRank(Meter()), Schedule("blocks", num_pieces=2, in_flight=1))
        switch_attention(model, lone, name="ds_hybrid_of_a_window")
        found = model(**batch).logits
    assert torch.allclose(found[mask], expected[mask], atol=1e-5)


def test_models_of_several_parts() -> None:
    import transformers

    config = transformers.LlavaConfig()
    assert config.get_text_config() is not config
    model: Any = make_model("mixtral")
    model.config = config
    with pytest.raises(ConfigError, match="MixtralForCausalLM holds more than a language model"):
        refuse_model(model)

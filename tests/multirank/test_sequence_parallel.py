"""Sequences that lie over ranks train as on one plain process: losses, norms, every parameter.

"Packed" and "padded" batches have another number of labels on every rank, in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ds_hybrid
from ds_hybrid.config import load
from ds_hybrid.errors import ConfigError
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.topology import probe
from tests.multirank.models import make_model
from tests.multirank.sequences import Sequences, make_engine, steps, train, train_plain, whole_batch
from tests.multirank.test_expert_groups import other_groups
from tests.multirank.training import gather_parameters, largest_difference, worst_parameter
from tests.ranks import RankPool

LOSS_TOLERANCE = 5e-6
NORM_TOLERANCE = 5e-5
PARAMETER_TOLERANCE = 2e-3
"""Relative to the largest change that training made to the parameter; losses and norms in absolute terms."""

VARIANTS = ["whole", "blocks", "ring", "auto"]
KINDS = ["whole", "packed", "padded"]


@dataclass(frozen=True)
class Errors:
    loss: float
    norm: float
    parameter: tuple[float, str]


def errors(run: Sequences, expert_groups: Any = "auto") -> Errors:
    if expert_groups == "auto":
        trained = train(run)
    else:
        with other_groups():
            trained = train(run)
    plain = train_plain(run, dist.get_world_size())
    initial = {name: p.detach().clone() for name, p in run.make_model().named_parameters()}
    return Errors(
        largest_difference(trained.losses, plain.losses),
        largest_difference(trained.norms, plain.norms) if run.clip else 0.0,
        worst_parameter(trained, plain, initial),
    )


def assert_equal(pool: RankPool, run: Sequences, *more: Any) -> None:
    for found in pool.run(errors, run, *more):
        assert found.loss <= LOSS_TOLERANCE, found
        assert found.norm <= NORM_TOLERANCE, found
        assert found.parameter[0] <= PARAMETER_TOLERANCE, found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_gather", VARIANTS)
def test_every_variant(four_ranks: RankPool, kv_gather: str, kind: Any) -> None:
    assert_equal(four_ranks, Sequences(kv_gather=kv_gather, kind=kind))


def test_padding_inside_rows(four_ranks: RankPool) -> None:
    """Prompts that were padded on the right, then completions: those see the prompts."""
    assert_equal(four_ranks, Sequences(kind="holes"))


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_every_stage(four_ranks: RankPool, zero_stage: int, kind: Any) -> None:
    """With accumulated gradients, clipped by the norm of the whole model, and a loss over router logits."""
    run = Sequences(zero_stage=zero_stage, kind=kind, accumulation=2, clip=0.1, balance=True)
    assert_equal(four_ranks, run)


@pytest.mark.parametrize(("sequence_size", "ep_size"), [(4, 4), (4, 2), (2, 4), (2, 1), (4, 1)])
def test_every_size(four_ranks: RankPool, sequence_size: int, ep_size: int) -> None:
    assert_equal(four_ranks, Sequences(sequence_size=sequence_size, ep_size=ep_size, kind="packed", clip=0.1))


@pytest.mark.parametrize("mode", ["alltoall", "allgather", "auto"])
def test_every_dispatcher(four_ranks: RankPool, mode: str) -> None:
    assert_equal(four_ranks, Sequences(mode=mode, ep_size=4, kind="padded"))


def test_hierarchical(four_ranks: RankPool) -> None:
    """Each node holds one group of sequences."""
    for found in four_ranks.run(errors_on_two_nodes, Sequences(mode="hierarchical", ep_size=4)):
        assert found.loss <= LOSS_TOLERANCE


def test_expert_groups_across_sequences(four_ranks: RankPool) -> None:
    """The ranks that share experts need not be those that share a sequence."""
    groups = [[0, 2], [1, 3]]
    run = Sequences(kind="packed")
    hybrid = {**run.ds_config()["ds_hybrid"], "topology": {"expert_groups": groups}}
    assert_equal(four_ranks, replace(run, changes={"ds_hybrid": hybrid}), groups)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v2", "deepseek_v3"])
def test_other_models(four_ranks: RankPool, model_type: str, kind: Any) -> None:
    """DeepSeek's values have other heads than its keys."""
    assert_equal(four_ranks, Sequences(model_type=model_type, kind=kind, model_changes=CHANGES.get(model_type, {})))


CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"qk_nope_head_dim": 12, "v_head_dim": 8},
    "deepseek_v3": {"qk_nope_head_dim": 12, "v_head_dim": 8},
}


@pytest.mark.parametrize("kv_gather", VARIANTS)
@pytest.mark.parametrize("kind", ["whole", "packed"])
def test_sliding_window(four_ranks: RankPool, kv_gather: str, kind: Any) -> None:
    assert_equal(
        four_ranks,
        Sequences(
            model_type="mixtral",
            model_changes={"sliding_window": 5},
            kv_gather=kv_gather,
            kind=kind,
            sequence_size=4,
        ),
    )


@pytest.mark.parametrize("checkpointing", [None, True])
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_window_that_only_the_mask_knows(four_ranks: RankPool, zero_stage: int, checkpointing: bool | None) -> None:
    """Qwen2-MoE tells its attention nothing of it, and only its second layer has it."""
    run = Sequences(
        model_type="qwen2_moe",
        model_changes=WINDOW_IN_THE_MASK,
        kind="padded",
        zero_stage=zero_stage,
        checkpointing=checkpointing,
    )
    assert_equal(four_ranks, run)


WINDOW_IN_THE_MASK: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "use_sliding_window": True,
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention"],
}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kv_gather", ["blocks", "ring"])
def test_activation_checkpointing(four_ranks: RankPool, kv_gather: str, use_reentrant: bool) -> None:
    run = Sequences(kv_gather=kv_gather, checkpointing=use_reentrant, kind="packed", mode="alltoall", zero_stage=2)
    assert_equal(four_ranks, run)


def test_key_heads_that_ulysses_cannot_share_out(four_ranks: RankPool) -> None:
    """6 heads over 4 ranks, 3 of them with keys and values."""
    changes = {"num_attention_heads": 6, "num_key_value_heads": 3}
    assert_equal(four_ranks, Sequences(sequence_size=4, model_changes=changes, kind="padded"))


def test_memory_limit(four_ranks: RankPool) -> None:
    assert_equal(four_ranks, Sequences(kv_gather="blocks", attention={"memory_bytes": 4096}, kind="packed"))


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_bf16(four_ranks: RankPool, zero_stage: int) -> None:
    """Only rounding differs from the plain model in fp32: 0.07 of the changes; 0.11 if keys' gradients lack a fifth."""
    run = Sequences(bf16=True, zero_stage=zero_stage, mode="alltoall", clip=0.5, learning_rate=2.0, **SMOOTH)
    for loss, norm, change in four_ranks.run(rounding_errors, run):
        assert loss <= 0.01
        assert norm <= 0.06
        assert change <= 0.09


@pytest.mark.parametrize("kv_gather", ["blocks", "ring"])
def test_fp8_on_the_wire(four_ranks: RankPool, kv_gather: str) -> None:
    """Rounded, and only keys and values: 0.03 of the changes; 0.09 with gradients as above."""
    run = Sequences(kv_gather=kv_gather, attention={"wire_dtype": "fp8_e4m3"}, **SMOOTH)
    for loss, _, change in four_ranks.run(rounding_errors, run):
        assert 0 < loss <= 0.01
        assert 0 < change <= 0.05


def test_autocast(four_ranks: RankPool) -> None:
    """Masters in fp32, products in bf16: rounded as in bf16, and parameters not at all."""
    autocast = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    for loss, _, change in four_ranks.run(rounding_errors, Sequences(mode="alltoall", changes=autocast, **SMOOTH)):
        assert 0 < loss <= 0.01
        assert change <= 0.03


SMOOTH: dict[str, Any] = {"kind": "packed", "model_changes": {"num_experts_per_tok": 8}}
"""Every token goes to all experts: rounding turns no route, so what it does stays small."""


def test_evaluation_gives_the_logits_of_the_plain_model(four_ranks: RankPool) -> None:
    for kind in KINDS:
        for difference in four_ranks.run(logits_difference, Sequences(kind=kind, zero_stage=3)):  # type: ignore[arg-type]
            assert difference <= 1e-5


def test_hugging_faces_loss_function_takes_the_batches(four_ranks: RankPool) -> None:
    for ours, theirs in four_ranks.run(both_losses, Sequences(kind="padded")):
        assert ours == pytest.approx(theirs, abs=1e-6)


def test_a_module_that_holds_the_model(four_ranks: RankPool) -> None:
    """With router logits, and without."""
    for with_logits in (True, False):
        for wrapped, bare in four_ranks.run(losses_of_a_wrapped_model, Sequences(balance=with_logits, kind="padded")):
            assert wrapped == pytest.approx(bare, abs=1e-6)


def test_experts_that_move_change_nothing(four_ranks: RankPool) -> None:
    for found in four_ranks.run(errors_with_a_move, Sequences(kind="packed", mode="alltoall")):
        assert found <= LOSS_TOLERANCE


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(four_ranks: RankPool, tmp_path: Path, zero_stage: int) -> None:
    run = Sequences(kind="packed", zero_stage=zero_stage, adam=True, num_steps=4, mode="alltoall")
    for straight, resumed, difference in four_ranks.run(stop_and_resume, run, str(tmp_path)):
        assert resumed == straight
        assert difference == 0


def test_training_data_is_dealt_out_by_sequence(four_ranks: RankPool) -> None:
    """DeepSpeed's own loader gives the ranks of a sequence the same samples, which become shards."""
    found = four_ranks.run(samples_of_loader)
    assert [sequence for sequence, _, _ in found] == [0, 0, 1, 1]
    for first, second in ((0, 1), (2, 3)):
        assert found[first][1] == found[second][1]
    seen = found[0][1] + found[2][1]
    assert sorted(seen) == list(range(8))
    assert {length for _, _, length in found} == {4}


OTHER_BATCHES = (
    "the batches of sequences: ranks 0 and 1 share sequences and have read different ones. Give the loader a sampler "
    "of engine.sequence_parallel.num_sequences replicas, and engine.sequence_parallel.sequence as the replica."
)
NOT_ONE_SEQUENCE = (
    "ds_hybrid.attention.kv_gather: the position_ids of the ranks do not make one sequence: they must go on by one, or "
    "restart at 0 where a packed document begins. Each rank holds an early and a late chunk of it, as "
    "engine.sequence_parallel.batches and .shard give them: give the model those, not the whole batch."
)
MISTAKES = {
    "an mpu": "ds_hybrid.initialize(mpu=...): with ds_hybrid.attention.kv_gather, the groups of ranks come from "
    'sequence_parallel_size. Leave it out, or set kv_gather to "off".',
    "a plain module": "ds_hybrid.attention.kv_gather: Linear holds no Hugging Face model, whose attention could be "
    'switched. Pass one, or set it to "off".',
    "linear attention": "ds_hybrid.attention.kv_gather: Qwen3_5MoeForCausalLM has layers of kind linear_attention, "
    'which would mix the tokens of this rank alone. Set it to "off".',
    "dropout": "ds_hybrid.attention.kv_gather: Qwen3MoeForCausalLM has attention_dropout = 0.1: must be 0 where "
    "keys and values are gathered. Set it to 0.",
    "no sequences": 'ds_hybrid.attention.kv_gather = "auto" (ds_config): nothing to gather: sequence_parallel_size is '
    '1. Set that to the number of ranks that share a sequence, or ds_hybrid.attention.kv_gather to "off".',
    "consecutive shards": NOT_ONE_SEQUENCE,
    "a whole batch on every rank": NOT_ONE_SEQUENCE,
    "whole batches of odd length": NOT_ONE_SEQUENCE,
    "other batches": OTHER_BATCHES,
    "other labels": OTHER_BATCHES,
    "other masks": OTHER_BATCHES,
    "other lengths": OTHER_BATCHES,
    "fewer batches": "the batches of sequences: rank 3 has no more, others do. Give all as many.",
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_raise_one_readable_error_on_every_rank(four_ranks: RankPool, case: str) -> None:
    assert four_ranks.run(message_of_mistake, case) == [MISTAKES[case]] * 4


def test_the_shipped_ds_config_is_accepted() -> None:
    config = load("ds_configs/sequence_parallel_zero1_bf16.json", world_size=4, num_experts=8)
    assert config.attention.kv_gather == "auto"


def rounding_errors(run: Sequences) -> tuple[float, float, float]:
    """Of losses; of norms, relative; and of all that training changed, relative to the norm of that."""
    trained, plain = train(run), train_plain(run, dist.get_world_size())
    initial = dict(run.make_model().named_parameters())
    expected = {name: values.double() - initial[name].detach() for name, values in plain.parameters.items()}
    errors = [trained.parameters[name].double() - plain.parameters[name] for name in expected]
    norms = zip(trained.norms, plain.norms, strict=True) if run.clip else []
    return (
        largest_difference(trained.losses, plain.losses),
        max((abs(ours / theirs - 1) for ours, theirs in norms), default=0.0),
        float(norm_of(errors) / norm_of(expected.values())),
    )


def norm_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.stack([values.norm() for values in tensors]).norm()


def errors_on_two_nodes(run: Sequences) -> Errors:
    with other_groups(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "key_of_this_host", lambda: f"node {dist.get_rank() // 2}")
        return errors(run)


def logits_difference(run: Sequences) -> float:
    engine = make_engine(run)
    sequences = engine.sequence_parallel
    whole = whole_batch(run, 0, sequences.sequence)
    labels = whole.pop("labels")
    engine.eval()
    with torch.no_grad():
        expected = run.make_model().eval()(**whole, use_cache=False).logits
        found = engine(**sequences.shard(whole), use_cache=False).logits
    engine.destroy()
    part = sequences.shard({"input_ids": labels, "logits": expected, "is_real": (labels != -100).long()})
    return float(((found - part["logits"]) * part["is_real"][..., None]).abs().max())


def both_losses(run: Sequences) -> tuple[float, float]:
    """Of this rank: ours, and that of transformers, which a training loop of one's own may call."""
    engine = make_engine(run)
    sequences = engine.sequence_parallel
    (batch,) = sequences.batches([whole_batch(run, 0, sequences.sequence)])
    outputs = engine(**batch, use_cache=False)
    theirs = engine.module.loss_function(
        logits=outputs.logits,
        labels=None,
        shift_labels=batch["shift_labels"],
        vocab_size=outputs.logits.shape[-1],
        num_items_in_batch=batch["num_items_in_batch"],
    )
    ours = sequences.loss(outputs, batch)
    engine.destroy()
    return float(ours.detach()), float(theirs.detach())


class Holder(torch.nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


def losses_of_a_wrapped_model(run: Sequences) -> list[float]:
    losses = []
    for wrap in (Holder, lambda model: model):
        model = wrap(run.make_model())
        engine, *_ = ds_hybrid.initialize(
            model=model, model_parameters=model.parameters(), config={**run.ds_config(), "expert_parallel": {}}
        )
        sequences = engine.sequence_parallel
        (batch,) = sequences.batches([whole_batch(run, 0, sequences.sequence)])
        losses.append(float(sequences.loss(engine(**batch, use_cache=False), batch).detach()))
        engine.destroy()
    return losses


def errors_with_a_move(run: Sequences) -> float:
    def between(engine: Any, step: int) -> None:
        if step == 2:
            place = np.array([7, 1, 2, 3, 4, 5, 6, 0])
            swapped = ExpertPlacement(place // 4, place % 4)
            engine.move_experts(dict.fromkeys(engine.moe_layers_by_name(), swapped))

    return largest_difference(train(run, between).losses, train_plain(run, dist.get_world_size()).losses)


def stop_and_resume(run: Sequences, folder: str) -> tuple[list[float], list[float], float]:
    """The last two losses of a straight run and of one that resumed, and how far their parameters are apart."""
    engine = make_engine(run)
    steps(engine, run, range(2))
    engine.save_checkpoint(folder)
    straight, _ = steps(engine, run, range(2, 4))
    expected = gather_parameters(engine.module)
    engine.destroy()
    engine = make_engine(run)
    engine.load_checkpoint(folder)
    resumed, _ = steps(engine, run, range(2, 4))
    found = gather_parameters(engine.module)
    engine.destroy()
    return straight, resumed, max(float((found[name] - expected[name]).abs().max()) for name in expected)


def samples_of_loader() -> tuple[int, list[int], int]:
    """The group of this rank, the samples that it has a part of, and the length of a part."""
    run = Sequences()
    model = run.make_model()
    samples = [{"input_ids": torch.full((8,), number)} for number in range(8)]
    engine, _, loader, _ = ds_hybrid.initialize(
        model=model, model_parameters=model.parameters(), config=run.ds_config(), training_data=samples
    )
    loader.num_local_io_workers = 0  # these ranks may not start processes
    sequences = engine.sequence_parallel
    shards = list(sequences.batches(loader))
    engine.destroy()
    numbers = [int(row[0]) for shard in shards for row in shard["input_ids"]]
    return sequences.sequence, numbers, shards[0]["input_ids"].shape[1]


def message_of_mistake(case: str) -> str:
    run = Sequences()
    config = run.ds_config()
    models: dict[str, Any] = {
        "a plain module": lambda: torch.nn.Linear(2, 2),
        "linear attention": lambda: make_model("qwen3_5_moe_text"),
        "dropout": lambda: make_model("qwen3_moe", attention_dropout=0.1),
    }
    if case == "no sequences":
        config = {**config, "sequence_parallel_size": 1}
    model = models.get(case, run.make_model)()
    try:
        engine, *_ = ds_hybrid.initialize(
            model=model,
            model_parameters=model.parameters(),
            config=config,
            mpu=object() if case == "an mpu" else None,
        )
    except ConfigError as error:
        return str(error)
    try:
        return _message_of_batches(engine, run, case)
    finally:
        engine.destroy()


def _message_of_batches(engine: Any, run: Sequences, case: str) -> str:
    sequences = engine.sequence_parallel
    rank = dist.get_rank()
    try:
        if case == "consecutive shards":
            part = slice(4 * (rank % 2), 4 * (rank % 2) + 4)
            engine(input_ids=torch.ones(2, 4, dtype=torch.long), position_ids=torch.arange(8)[None, part])
        if case in ("a whole batch on every rank", "whole batches of odd length"):
            engine(input_ids=torch.ones(2, 7 if "odd" in case else 8, dtype=torch.long))
        if case == "other batches":
            list(sequences.batches([whole_batch(run, 0, rank)]))
        if case.startswith("other "):
            batch = whole_batch(replace(run, kind="padded"), 0, sequences.sequence)
            key = {"other labels": "labels", "other masks": "attention_mask"}.get(case)
            if key is None:
                batch = {name: values[:, : values.shape[1] - rank] for name, values in batch.items()}
            else:
                batch[key][0, 5] = rank % 2
            list(sequences.batches([batch]))
        if case == "fewer batches":
            list(sequences.batches([whole_batch(run, 0, sequences.sequence)] * (1 if rank == 3 else 2)))
    except ConfigError as error:
        return str(error)
    raise AssertionError(case)

"""Beside DeepSpeed's own sequence parallelism, Ulysses, on the same ranks: the same losses, and models it refuses.

Ulysses replaces an attention function of transformers for the whole process, so its ranks do nothing else. Over
SDPA it does not keep packed documents apart, so the batches here are whole sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
from torch import Tensor

from tests.multirank.sequences import Sequences, train, train_plain, whole_batch
from tests.multirank.training import largest_difference
from tests.ranks import RankPool

SIZE = 2
RUN = Sequences(given_length=16, sequence_size=SIZE, mode="alltoall", num_steps=4)
FEW_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3}


@pytest.fixture(scope="module")
def ranks_of_ulysses() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_the_same_losses(ranks_of_ulysses: RankPool, zero_stage: int) -> None:
    for difference in ranks_of_ulysses.run(compare, replace(RUN, zero_stage=zero_stage)):
        assert difference <= 5e-6


def test_heads_that_ulysses_refuses(ranks_of_ulysses: RankPool) -> None:
    """6 heads over 4 ranks train here; see also test_sequence_parallel.py."""
    run = replace(RUN, sequence_size=4, model_changes=FEW_HEADS, num_steps=2)
    for message, difference in ranks_of_ulysses.run(refused_and_trained, run):
        assert message == "Attention head count 6 is not divisible by SP size 4"
        assert difference <= 5e-6


def compare(run: Sequences) -> float:
    """The largest difference of a loss."""
    return largest_difference(train(run).losses, train_ulysses(run))


def train_ulysses(run: Sequences) -> list[float]:
    """As DeepSpeed's documentation has it: its attention, its groups, its adapter, and the loss over gathered parts."""
    model = run.make_model()
    model.set_attn_implementation("sdpa")
    mpu = groups_of_ulysses(model, run)
    # AutoEP refuses this mpu, so every rank has all experts.
    config = run.ds_config() | {"expert_parallel": {"enabled": False}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)
    rank, group = mpu.get_sequence_parallel_rank(), mpu.get_sequence_parallel_group()
    sequence = dist.get_rank() // SIZE
    # The adapter makes as many micro-batches as there are ranks of the one that each rank has read.
    own = [positioned(whole_batch(run, step, sequence)) for step in range(rank, run.num_steps, SIZE)]
    losses = []
    for batch in UlyssesSPDataLoaderAdapter(own, rank, group, SIZE, engine.device):
        labels = batch.pop("shift_labels")
        logits = engine(**batch, use_cache=False).logits
        local = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        # A mean over all tokens, of the other sequences too, so that both runs have one loss.
        num_tokens = (labels != -100).sum()
        dist.all_reduce(num_tokens)
        engine.backward(local * (dist.get_world_size() // SIZE) / num_tokens)
        engine.step()
        total = local.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total / num_tokens))
    engine.destroy()
    return losses


def groups_of_ulysses(model: Any, run: Sequences) -> Any:
    """Its mpu; the groups are those of a run before, where there was one."""
    if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is not None:
        return parallel_state_sp
    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation="sdpa",
        sequence_parallel_size=SIZE,
        micro_batch_size=2,
        seq_length=run.length,
        seq_length_is_variable=True,
    )


def positioned(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    positions = torch.arange(batch["input_ids"].shape[1]).expand(2, -1)
    return {"position_ids": positions, **batch}


def refused_and_trained(run: Sequences) -> tuple[str, float]:
    heads = run.model_changes
    try:
        UlyssesSPAttentionHF(
            attn=None,
            batch_size=2,
            attn_head_count=heads["num_attention_heads"],
            attn_head_size=8,
            kv_head_count=heads["num_key_value_heads"],
            num_hidden_layers=2,
            process_group=dist.group.WORLD,
            seq_length_is_variable=True,
        )
        message = ""
    except ValueError as error:
        message = str(error)
    return message, largest_difference(train(run).losses, train_plain(run, dist.get_world_size()).losses)

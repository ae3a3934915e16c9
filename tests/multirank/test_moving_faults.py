"""A move that goes wrong on any rank leaves every layer whole on all of them, and training goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds_hybrid.errors import PlacementError
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance import migrate
from ds_hybrid.rebalance.fragments import StateFinder
from tests.multirank.expert_states import expert_states
from tests.multirank.test_moving_experts import CONVERTED, different, loss_of
from tests.multirank.training import make_engine
from tests.ranks import RankFailureError, RankPool

RUN = replace(CONVERTED, accumulation=1)
LAYER, OTHER_LAYER = "model.layers.0.mlp", "model.layers.1.mlp"
WHOLE = "Nothing of this round has moved; every layer is whole."


def flip_a_bit(packed: Tensor) -> Tensor:
    packed[len(packed) // 3] ^= 1
    return packed


def run_out_of_memory(packed: Tensor) -> Tensor:
    raise torch.OutOfMemoryError("tried to allocate 3.00 GiB")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (flip_a_bit, f"could not {LAYER}: receive experts: what rank 1 sent came otherwise. {WHOLE}"),
        (run_out_of_memory, f"could not {LAYER}: stage what moves: tried to allocate 3.00 GiB. {WHOLE}"),
    ],
)
def test_a_round_that_fails_leaves_those_before_it(
    four_ranks: RankPool, fault: Callable[[Tensor], Tensor], message: str
) -> None:
    results = four_ranks.run(state_after_a_fault, fault)
    assert len({told for told, *_ in results}) == 1
    for told, wrong, num_moved, finite in results:
        assert message in told
        assert wrong == 0
        assert num_moved == 2, "the first round exchanged one expert of each rank, the second nothing"
        assert finite


def state_after_a_fault(fault: Callable[[Tensor], Tensor]) -> tuple[str, int, int, bool]:
    """Rank 1 spoils what it packs for the second round."""
    engine = trained_engine()
    pack, calls = migrate._pack, []

    def spoiled(*args: Any) -> Tensor:
        calls.append(None)
        packed = pack(*args)
        return fault(packed) if len(calls) == 2 and dist.get_rank() == 1 else packed

    start = engine.moe_layers_by_name()[LAYER].placement
    before = expert_states(engine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrate, "_pack", spoiled)
        with pytest.raises(PlacementError) as error:
            engine.move_experts({LAYER: ExpertPlacement.from_slots([[4, 5, 6, 7], [0, 1, 2, 3]])})
    wrong = different(before, expert_states(engine))
    placement = engine.moe_layers_by_name()[LAYER].placement
    loss = train_a_step(engine)
    engine.destroy()
    return str(error.value), wrong, int((placement.rank_of_expert != start.rank_of_expert).sum()), bool(loss.isfinite())


@pytest.mark.parametrize("more_layers", [False, True])
def test_ranks_that_plan_otherwise_move_nothing(four_ranks: RankPool, more_layers: bool) -> None:
    for told, wrong in four_ranks.run(state_after_a_disagreement, more_layers):
        assert told == f"rank 0 could not begin: find the same plan as the others. {WHOLE}"
        assert wrong == 0


def state_after_a_disagreement(more_layers: bool) -> tuple[str, int]:
    """Rank 2 has another placement for the layer, or one for another layer too."""
    engine = trained_engine()
    before = expert_states(engine)
    orders = ([[0, 1, 2, 7], [4, 5, 6, 3]], [[0, 1, 6, 3], [4, 5, 2, 7]])
    first, other = map(ExpertPlacement.from_slots, orders)
    different_targets = {LAYER: first, OTHER_LAYER: first} if more_layers else {LAYER: other}
    with pytest.raises(PlacementError) as error:
        engine.move_experts(different_targets if dist.get_rank() == 2 else {LAYER: first})
    wrong = different(before, expert_states(engine))
    engine.destroy()
    return str(error.value), wrong


def test_a_rank_that_dies_before_the_vote_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    pool = RankPool(4)
    with pytest.raises(RankFailureError):
        pool.run(survive, str(tmp_path), limit=60)
    pool.close()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys("012", "unchanged")


def survive(folder: str) -> None:
    engine = trained_engine()
    layer = engine.moe_layers_by_name()[LAYER]
    values = [parameter.detach().clone() for parameter in layer.experts.parameters()]
    placement = layer.placement
    check = migrate._is_whole

    def die(message: Tensor) -> bool:
        if dist.get_rank() == 3:
            os._exit(1)
        return check(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrate, "_is_whole", die)
        with pytest.raises(RuntimeError):
            engine.move_experts({LAYER: ExpertPlacement.from_slots([[0, 1, 2, 7], [4, 5, 6, 3]])})
    same = all(map(torch.equal, values, layer.experts.parameters())) and layer.placement is placement
    Path(folder, str(dist.get_rank())).write_text("unchanged" if same else "changed")
    os._exit(1)  # as a rank does that has lost another: those that wait for it learn of it


def test_moves_between_micro_batches_and_of_unknown_layers_are_refused(four_ranks: RankPool) -> None:
    for within_a_step, unknown in four_ranks.run(refusals):
        assert within_a_step.startswith("move_experts after 1 of 2 micro-batches: their gradients would go to other ")
        assert "could not plan the moves: the model has no MoE layer 'nowhere'" in unknown


def refusals() -> tuple[str, str]:
    engine = make_engine(CONVERTED)
    engine.backward(loss_of(engine, RUN, 0, 0))
    engine.step()
    with pytest.raises(PlacementError) as within_a_step:
        engine.move_experts({})
    engine.backward(loss_of(engine, RUN, 0, 1))
    engine.step()
    with pytest.raises(PlacementError) as unknown:
        engine.move_experts({"nowhere": ExpertPlacement.contiguous(8, 2)})
    engine.destroy()
    return str(within_a_step.value), str(unknown.value)


def test_an_optimizer_whose_state_has_no_place_for_each_element_is_refused() -> None:
    parameter = nn.Parameter(torch.zeros(4, 3))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter] = {"row_means": torch.zeros(4), "step": torch.tensor(7.0)}
    finder = StateFinder(optimizer)
    assert finder.numbers(parameter) == {"step": 7.0}
    with pytest.raises(PlacementError, match=r"SGD keeps 'row_means' of shape \[4\] for a tensor of \[4, 3\]"):
        finder.fragments(parameter)
    optimizer.state[parameter] = {"history": [1, 2]}
    with pytest.raises(PlacementError, match=r"SGD keeps 'history' as a list"):
        finder.fragments(parameter)


def test_experts_that_were_not_stepped_alike_are_refused(four_ranks: RankPool) -> None:
    for told in four_ranks.run(message_of_uneven_steps):
        assert f"rank 0 could not plan the moves: {LAYER}: the optimizer's 'step' is 2.0 for one expert and 5.0" in told


def message_of_uneven_steps() -> str:
    engine = trained_engine(zero_stage=0)
    for parameter in engine.moe_layers_by_name()[LAYER].experts.parameters():
        engine.optimizer.state[parameter]["step"].fill_(5.0 if parameter.shape[1] == 32 else 2.0)
    with pytest.raises(PlacementError) as error:
        engine.move_experts({LAYER: ExpertPlacement.from_slots([[0, 1, 2, 7], [4, 5, 6, 3]])})
    engine.destroy()
    return str(error.value)


def trained_engine(zero_stage: int = 2) -> Any:
    engine = make_engine(replace(RUN, zero_stage=zero_stage))
    train_a_step(engine)
    train_a_step(engine)
    return engine


def train_a_step(engine: Any) -> Tensor:
    loss = loss_of(engine, RUN, engine.global_steps, 0)
    engine.backward(loss)
    engine.step()
    return loss.detach()

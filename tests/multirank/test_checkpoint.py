"""A resumed run goes on as if it had not stopped, under every ZeRO stage, with one and two replicas of each expert."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.multirank.training import Run, batch, make_engine
from tests.ranks import RankPool


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ep_size", [2, 4])
def test_resume_equals_not_stopping(four_ranks: RankPool, tmp_path: Path, zero_stage: int, ep_size: int) -> None:
    for straight, resumed in four_ranks.run(losses_of_both, Run(zero_stage=zero_stage, ep_size=ep_size), str(tmp_path)):
        assert resumed == straight


def losses_of_both(run: Run, folder: str) -> tuple[list[float], list[float]]:
    """Losses of steps 2 and 3: straight on after a save at step 2, and in a new engine that loaded it."""
    straight = make_engine(run)
    _train(straight, range(2))
    straight.save_checkpoint(folder)
    expected = _train(straight, range(2, 4))
    straight.destroy()
    resumed = make_engine(run)
    resumed.load_checkpoint(folder)
    losses = _train(resumed, range(2, 4))
    resumed.destroy()
    return expected, losses


def _train(engine: object, steps: range) -> list[float]:
    losses = []
    for step in steps:
        ids = batch(step, dist.get_rank())
        loss = engine(input_ids=ids, labels=ids).loss  # type: ignore[operator]
        engine.backward(loss)  # type: ignore[attr-defined]
        engine.step()  # type: ignore[attr-defined]
        losses.append(float(loss.detach()))
    return losses

"""Each rank: the times of training steps over a slow link, of automatic groups and strided ones in turn."""

from __future__ import annotations

import time

import torch.distributed as dist

from tests.hosts.lab import tell
from tests.hosts.layers import Sizes, Trained, build, join, tokens_of_this_rank

SIZES = Sizes(num_tokens=512, hidden_size=256, num_experts=8, top_k=4)
NUM_ROUNDS = 5


def main() -> None:
    join()
    runners = {
        "automatic": build(SIZES, ep_size=2),
        "strided": build(SIZES, ep_size=2, dispatch={"mode": "alltoall"}, topology={"expert_groups": [[0, 2], [1, 3]]}),
    }
    for runner in runners.values():  # after its first step the automatic dispatcher is chosen
        seconds_of_step(runner)
        seconds_of_step(runner)
    rounds = [{name: seconds_of_step(runner) for name, runner in runners.items()} for _ in range(NUM_ROUNDS)]
    tell(
        rank=dist.get_rank(),
        groups={name: runner.expert_groups for name, runner in runners.items()},
        modes={name: runner.moe.dispatcher.mode for name, runner in runners.items()},
        seconds={name: [one[name] for one in rounds] for name in runners},
    )


def seconds_of_step(runner: Trained) -> float:
    """Forward, backward and the optimizer's step, until all ranks are done."""
    dist.barrier()
    start = time.perf_counter()
    engine = runner.take_engine()
    engine.backward(engine(tokens_of_this_rank(SIZES)).square().mean())
    engine.step()
    dist.barrier()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()

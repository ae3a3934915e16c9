"""Each rank: how many bytes its host sends to the other while a MoE layer runs forward and backward.

Reported with what the formulas say of the link between the hosts, for the routing that there was.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import psutil
import torch.distributed as dist

from ds_hybrid.dispatch.modes import Mode
from ds_hybrid.dispatch.nodes import hops_over_nodes
from ds_hybrid.dispatch.traffic import IntArray, WireShape, backward_traffic, forward_traffic
from tests.hosts.lab import tell
from tests.hosts.layers import Sizes, Trained, build, join, tokens_of_this_rank

SIZES = Sizes(num_tokens=1024, hidden_size=256, num_experts=16, top_k=4)
STRIDED = [[0, 2], [1, 3]]


def main() -> None:
    join()
    layers = {
        "automatic": _layer(2, "two_stage", expert_groups="auto"),
        "strided": _layer(2, "two_stage", expert_groups=STRIDED),
        **{mode: _layer(4, mode, expert_groups="auto") for mode in ("alltoall", "two_stage", "hierarchical")},
    }
    idle = bytes_sent_during(lambda: None)
    sent = {name: bytes_sent_during(partial(run, layer)) - idle for name, layer in layers.items()}
    cluster = layers["automatic"].engine.cluster
    tell(
        rank=dist.get_rank(),
        host=socket.gethostname(),
        hosts={host.name: host.ranks for host in cluster.hosts},
        groups={name: layer.expert_groups for name, layer in layers.items()},
        modes={name: layer.moe.dispatcher.mode for name, layer in layers.items()},
        sent=sent,
        predicted={name: predict(layer, cluster.host_of_rank) for name, layer in layers.items()},
    )


def _layer(ep_size: int, mode: Mode, *, expert_groups: str | list[list[int]]) -> Trained:
    # The gradients stay where they are: no step is ever due.
    layer = build(
        SIZES, ep_size=ep_size, accumulation=1000, dispatch={"mode": mode}, topology={"expert_groups": expert_groups}
    )
    run(layer)
    return layer


def run(layer: Trained) -> None:
    engine = layer.take_engine()
    engine.backward(engine(tokens_of_this_rank(SIZES)).square().mean())


def bytes_sent_during(act: Callable[[], None]) -> int:
    """By this host to the other, with what makes the ranks start and end together."""
    dist.barrier()
    before = psutil.net_io_counters(pernic=True)["eth0"].bytes_sent
    act()
    dist.barrier()
    return int(psutil.net_io_counters(pernic=True)["eth0"].bytes_sent - before)


def predict(layer: Trained, host_of_rank: Sequence[int]) -> int:
    """Bytes of payload from all hosts to others, of one forward and backward."""
    group = layer.moe.dispatcher.group
    routing = layer.moe.deepspeed_moe.gate(tokens_of_this_rank(SIZES), None).routing
    mine = routing.topk_ids.numpy() // (SIZES.num_experts // group.size)
    of_rank: list[IntArray] = [mine] * dist.get_world_size()
    dist.all_gather_object(of_rank, mine)
    shape = WireShape(
        num_ranks=group.size,
        num_experts=SIZES.num_experts,
        top_k=SIZES.top_k,
        hidden_size=SIZES.hidden_size,
        value_bytes=4,
    )
    return sum(
        crossing_bytes(
            layer.moe.dispatcher.mode,
            [of_rank[rank] for rank in ranks],
            shape,
            host_of_rank=[host_of_rank[rank] for rank in ranks],
        )
        for ranks in layer.expert_groups
    )


def crossing_bytes(
    mode: Mode, rank_of_choice: Sequence[IntArray], shape: WireShape, *, host_of_rank: Sequence[int]
) -> int:
    """The payload of a forward and a backward that leaves the hosts.

    The formulas count what leaves the ranks. So choices that stay on a host become the rank's own, and with
    ``hierarchical``, where another rank hands a row on inside its host, they become those of that other rank.
    """
    hosts = np.asarray(host_of_rank)
    if mode == "hierarchical":
        first_hop, _ = hops_over_nodes(host_of_rank)
        crossing = [first_hop[rank][choices] for rank, choices in enumerate(rank_of_choice)]
    else:
        crossing = [
            np.where(hosts[choices] == hosts[rank], rank, choices) for rank, choices in enumerate(rank_of_choice)
        ]
    forward = forward_traffic(mode, crossing, shape, node_of_rank=host_of_rank)
    backward = backward_traffic(mode, crossing, shape, node_of_rank=host_of_rank)
    return int(forward.payload.sum() + backward.payload.sum())


if __name__ == "__main__":
    main()

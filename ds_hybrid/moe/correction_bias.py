"""The bias that evens the load of experts without a loss: moved once per optimizer step, by what all ranks routed."""

from __future__ import annotations

from collections.abc import Sequence

import deepspeed.comm as dist
import torch

from ds_hybrid.moe.router import Router


def update_correction_biases(routers: Sequence[Router], *, apply: bool) -> None:
    """Move each bias towards an even load by its rate: down for experts above the mean, up for those below.

    Algorithm 1 of arXiv 2408.15664, as in DeepSeek-V3. One all-reduce over all ranks for all routers together; all
    ranks call it after each optimizer step. Without biases there is no collective.

    Args:
        routers: in the same order on every rank. Those without a bias are passed over.
        apply: False to throw the loads away, as for a step that was skipped.
    """
    biases = [router.correction_bias for router in routers if router.correction_bias is not None]
    loads = [router.load_since_update for router in routers if router.load_since_update is not None]
    rates = [router.options.bias_update_rate for router in routers if router.correction_bias is not None]
    if apply and loads:
        total = torch.cat(loads)
        if dist.is_initialized():
            dist.all_reduce(total)
        for bias, load, rate in zip(biases, total.split([len(load) for load in loads]), rates, strict=True):
            bias += rate * torch.sign(load.double().mean() - load)
    for load in loads:
        load.zero_()

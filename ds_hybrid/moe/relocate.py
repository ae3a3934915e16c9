"""Experts built for one place of an expert-parallel group travel to the ranks that have that place."""

from __future__ import annotations

from itertools import chain

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_hybrid.errors import ConfigError


def relocate(experts: nn.Module, *, built_for: int, place: int) -> None:
    """Fetch the values of the experts that belong to ``place``. Collective over all ranks.

    Every value comes from the lowest rank that has built it. All ranks have modules of one architecture.

    Args:
        experts: this rank's, built for the place ``built_for``; their values are overwritten, the parameters stay.
        place: this rank's place in its expert-parallel group.

    Raises:
        ConfigError: on every rank, when no rank has built the experts of some place.
    """
    here = torch.tensor([built_for, place], device=get_accelerator().current_device_name())
    of_rank = [torch.empty_like(here) for _ in range(dist.get_world_size())]
    dist.all_gather(of_rank, here)
    built, wanted = zip(*(pair.tolist() for pair in of_rank), strict=True)
    missing = sorted(set(wanted) - set(built))
    if missing:
        raise ConfigError(
            f"ds_hybrid.MoE: no rank has built the experts for places {', '.join(map(str, missing))} of an "
            "expert-parallel group. Call deepspeed.init_distributed() before building the model."
        )
    with torch.no_grad():
        values = [tensor.detach().clone() for tensor in chain(experts.parameters(), experts.buffers())]
        for rank, wanted_place in enumerate(wanted):
            if built[rank] != wanted_place:
                _hand_over(values, experts, source=built.index(wanted_place), target=rank)


def _hand_over(values: list[torch.Tensor], experts: nn.Module, *, source: int, target: int) -> None:
    """Send what ``source`` has built to ``target``; other ranks do nothing."""
    device = get_accelerator().current_device_name()
    for value, tensor in zip(values, chain(experts.parameters(), experts.buffers()), strict=True):
        if dist.get_rank() == source:
            dist.send(value.to(device).contiguous(), target)
        elif dist.get_rank() == target:
            received = torch.empty_like(value, device=device, memory_format=torch.contiguous_format)
            dist.recv(received, source)
            tensor.copy_(received)

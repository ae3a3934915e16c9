"""All ranks built the same thing, or every one of them says what differs. Once, at the start of a run."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from ds_hybrid.errors import ConfigError


def compare_ranks(facts: Mapping[str, str]) -> None:
    """Compare what each rank has built. Collective over all ranks; every rank raises alike.

    Args:
        facts: what this rank has of each thing by name, such as ``{"model.layers.0.mlp": "alltoall, 8 experts"}``.

    Raises:
        ConfigError: one line for each thing that differs between rank 0 and the first rank that has it otherwise.
    """
    of_rank: list[Mapping[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_rank, dict(facts))
    problems = []
    for name in sorted(set().union(*of_rank)):
        here = of_rank[0].get(name, "nothing")
        for rank, theirs in enumerate(of_rank):
            if theirs.get(name, "nothing") != here:
                problems.append(
                    f"{name}: ranks 0 and {rank} differ: {here} and {theirs.get(name, 'nothing')}. "
                    "Give every host the same ds_config and the same model."
                )
                break
    if problems:
        raise ConfigError(*problems)

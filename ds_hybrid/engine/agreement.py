"""All ranks were given and built the same, or every one of them says what differs. At the start of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from ds_hybrid.errors import ConfigError

_LONGEST = 100


def raise_alike(problems: Sequence[str]) -> None:
    """Raise on every rank what any rank has to complain about. Collective over all ranks.

    Raises:
        ConfigError: the problems, where not all ranks have them with the rank that does.
    """
    of_rank: list[tuple[str, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(of_rank, tuple(problems))
    if len(set(of_rank)) > 1:
        raise ConfigError(*(f"rank {rank}: {line}" for rank, lines in enumerate(of_rank) for line in lines))
    if problems:
        raise ConfigError(*problems)


def compare_ranks(facts: Mapping[str, str]) -> None:
    """Compare what the ranks have. Collective over all ranks; every rank raises alike.

    Args:
        facts: what this rank has of each thing by name, such as ``{"model.layers.0.mlp": "alltoall, 8 experts"}``.

    Raises:
        ConfigError: one line for each thing that differs between rank 0 and the first rank that has it otherwise.
    """
    of_rank: list[Mapping[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(of_rank, dict(facts))
    problems = []
    for name in sorted(set().union(*of_rank)):
        values = [theirs.get(name, "nothing") for theirs in of_rank]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            problems.append(
                f"{name}: ranks 0 and {other} differ: {_short(values[0])} and {_short(values[other])}. "
                "Give every host the same ds_config and the same model."
            )
    if problems:
        raise ConfigError(*problems)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."

"""The experts of this rank: how they are built, marked for DeepSpeed, and run over rows sorted by slot."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ds_hybrid.errors import ConfigError

ExpertSource = nn.Module | Callable[[], nn.Module]


class LocalExperts(nn.Module):
    """Any modules [rows, H] -> [rows, H], one per slot.

    Args:
        experts: the module of each slot.
        group_name: DeepSpeed's name of the expert-parallel group.

    Attributes:
        deepspeed_experts: the modules, by slot; DeepSpeed's checkpoints know them by this name.
    """

    def __init__(self, experts: Sequence[nn.Module], group_name: str) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(experts)
        self.num_local_experts = len(experts)
        self.group_name = group_name
        self.mark()

    def mark(self) -> None:
        """Tell DeepSpeed that every parameter here is this expert's own: reduced over its replicas only."""
        for parameter in self.parameters():
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = self.group_name  # type: ignore[attr-defined]

    def forward(self, rows: Tensor, num_rows_per_slot: Tensor) -> Tensor:
        """Run each row through the expert of its slot.

        Args:
            rows: [R, H], sorted by slot.
            num_rows_per_slot: [S] int64, sums to R. An expert without rows runs on none, so its gradients are 0.

        Returns:
            [R, H] in the dtype of ``rows``. Of an expert's tuple the first entry counts.
        """
        parts = rows.split(num_rows_per_slot.tolist())
        outputs = [_first(expert(part)) for expert, part in zip(self.deepspeed_experts, parts, strict=True)]
        return torch.cat(outputs).to(rows.dtype)


def build_expert(source: ExpertSource, *, seed: int, expert_id: int) -> nn.Module:
    """A new expert whose initial values depend on (source, seed, expert_id) alone, whoever builds it.

    A factory is called with torch's generators seeded, and they are put back afterwards. A module is copied, and each
    trainable parameter of the copy shuffled along each of its axes: that keeps what the module's author chose (scale,
    bounds, zeros, orthogonality) where ``reset_parameters`` would not. Pass a factory for initial values that must not
    be shuffled, such as a trained module's.

    Raises:
        ConfigError: the factory does not return a module.
    """
    seed_of_expert = int(np.random.SeedSequence([seed, expert_id]).generate_state(1, np.uint64)[0])
    if isinstance(source, nn.Module):
        expert = copy.deepcopy(source)
        _shuffle(expert, torch.Generator().manual_seed(seed_of_expert))
        return expert
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed_of_expert)
        expert = source()
    if not isinstance(expert, nn.Module):
        raise ConfigError(
            f"ds_hybrid.MoE(expert=...): the factory returned a {type(expert).__name__}, must return a torch.nn.Module."
        )
    return expert


def _shuffle(module: nn.Module, generator: torch.Generator) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad and not parameter.is_meta:
                values = parameter
                for axis, length in enumerate(parameter.shape):
                    order = torch.randperm(length, generator=generator, device="cpu").to(parameter.device)
                    values = values.index_select(axis, order)  # type: ignore[assignment]
                parameter.copy_(values)


def _first(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return output[0] if isinstance(output, tuple) else output

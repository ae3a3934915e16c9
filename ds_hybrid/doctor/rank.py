"""One of the ranks that :mod:`ds_hybrid.doctor.collective` starts. Prints the sum that every rank must get."""

from __future__ import annotations

import os

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

NUM_VALUES = 2**18
"""The float32 values that are summed up: 1 MiB."""


def main() -> None:
    """Start as in a run, and sum up one tensor over all ranks."""
    accelerator = get_accelerator()
    place = int(os.environ["LOCAL_RANK"])
    accelerator.set_device(place)
    deepspeed.init_distributed(accelerator.communication_backend_name(), verbose=False)
    values = torch.full((NUM_VALUES,), dist.get_rank() + 1.0, device=accelerator.device_name(place))
    dist.all_reduce(values)
    accelerator.synchronize()
    low, high = values.min().item(), values.max().item()
    print(f"sum {low} to {high}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

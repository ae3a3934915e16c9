"""What one forward and backward of a layer costs on this rank: time, bytes on the wire, memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import deepspeed.comm as dist
import torch
from cases import Batch
from methods import Method
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

NUM_PEAKS = 3
"""Peaks of resident memory that are measured for their median: single ones vary by a fifth."""


@dataclass(frozen=True)
class Seconds:
    """``wall`` is the device's own time where the device is a GPU. ``cpu`` is of all threads of this process."""

    cpu_forward: float
    cpu_backward: float
    wall_forward: float
    wall_backward: float


@dataclass(frozen=True)
class Exchange:
    """One collective: the bytes that this rank sent to others and received from them."""

    operation: str
    sent: int
    received: int


@dataclass(frozen=True)
class Memory:
    """Bytes. ``saved``: what backward keeps alive after forward, weights apart. ``peak``: the growth at its highest."""

    saved: int
    peak: int | None


def run_once(method: Method, batch: Batch) -> tuple[Tensor, Tensor]:
    """Output and gradient of the tokens."""
    tokens = prepare(method, batch)
    output = method.forward(tokens)
    output.backward(batch.upstream)
    assert tokens.grad is not None
    return output, tokens.grad


def time_once(method: Method, batch: Batch) -> Seconds:
    """Starts after a barrier of all ranks."""
    tokens = prepare(method, batch)
    mark = _cuda_mark if tokens.is_cuda else _cpu_mark
    dist.barrier()
    start = mark()
    output = method.forward(tokens)
    middle = mark()
    output.backward(batch.upstream)
    end = mark()
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return Seconds(
        cpu_forward=middle.cpu - start.cpu,
        cpu_backward=end.cpu - middle.cpu,
        wall_forward=start.wall_until(middle),
        wall_backward=middle.wall_until(end),
    )


def exchanges_of(method: Method, batch: Batch) -> tuple[list[Exchange], list[Exchange]]:
    """The collectives of forward and those of backward, in order."""
    tokens = prepare(method, batch)
    with ExchangeCounter() as forward:
        output = method.forward(tokens)
    with ExchangeCounter() as backward:
        output.backward(batch.upstream)
    return forward.exchanges, backward.exchanges


def memory_of(method: Method, batch: Batch) -> Memory:
    """One forward for what it keeps, then a forward and backward for the peak."""
    return Memory(_saved_bytes(method, batch), _peak_bytes(method, batch))


class ExchangeCounter(TorchDispatchMode):
    """Counts every collective below torch.distributed's Python functions, whoever calls it, in the ideal algorithm.

    The ideal: a rank sends each byte once to each rank that needs it, and reduces in a ring.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: list[Exchange] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.namespace == "c10d":
            name = function._opname
            if name not in _TRAFFIC:
                raise NotImplementedError(f"no byte count for the collective {name}")
            position = next(i for i, argument in enumerate(args) if isinstance(argument, torch.ScriptObject))
            group = ProcessGroup.unbox(args[position])
            self.exchanges.append(Exchange(name, *_TRAFFIC[name](args, group.size(), group.rank())))
        return function(*args, **(kwargs or {}))


def _alltoall(args: tuple[Any, ...], size: int, rank: int) -> tuple[int, int]:
    output, rows, _, receive_counts, send_counts = args[:5]
    return _leaving(rows, send_counts, size, rank), _leaving(output, receive_counts, size, rank)


def _leaving(rows: Tensor, counts: list[int], size: int, rank: int) -> int:
    if not counts:
        return rows.nbytes // size * (size - 1)
    return rows.nbytes // max(sum(counts), 1) * (sum(counts) - counts[rank])


def _gather(args: tuple[Any, ...], size: int, rank: int) -> tuple[int, int]:
    own = sum(_nbytes(args[1])) if isinstance(args[1], list) else args[1].nbytes
    return own * (size - 1), own * (size - 1)


def _scatter(args: tuple[Any, ...], size: int, rank: int) -> tuple[int, int]:
    return args[0].nbytes * (size - 1), args[0].nbytes * (size - 1)


def _reduce(args: tuple[Any, ...], size: int, rank: int) -> tuple[int, int]:
    both_ways = 2 * sum(_nbytes(args[0])) * (size - 1) // size
    return both_ways, both_ways


def _lists(args: tuple[Any, ...], size: int, rank: int) -> tuple[int, int]:
    outputs, inputs = _nbytes(args[0]), _nbytes(args[1])
    return sum(inputs) - inputs[rank], sum(outputs) - outputs[rank]


def _nbytes(tensors: list[Tensor]) -> list[int]:
    return [tensor.nbytes for tensor in tensors]


_TRAFFIC: dict[str, Callable[[tuple[Any, ...], int, int], tuple[int, int]]] = {
    "alltoall_base_": _alltoall,
    "alltoall_": _lists,
    "_allgather_base_": _gather,
    "allgather_": _gather,
    "_reduce_scatter_base_": _scatter,
    "allreduce_": _reduce,
    "send": lambda args, size, rank: (sum(_nbytes(args[0])), 0),
    "recv_": lambda args, size, rank: (0, sum(_nbytes(args[0]))),
    "barrier": lambda args, size, rank: (0, 0),
}


def prepare(method: Method, batch: Batch) -> Tensor:
    """The tokens as a new leaf, and no gradients left from before."""
    method.module.zero_grad(set_to_none=True)
    return batch.tokens.detach().clone().requires_grad_()


@dataclass(frozen=True)
class _CpuMark:
    cpu: float
    wall: float

    def wall_until(self, later: _CpuMark) -> float:
        return later.wall - self.wall


@dataclass(frozen=True)
class _CudaMark:
    cpu: float
    event: Any

    def wall_until(self, later: _CudaMark) -> float:
        return float(self.event.elapsed_time(later.event)) / 1000


def _cpu_mark() -> Any:
    return _CpuMark(time.process_time(), time.perf_counter())


def _cuda_mark() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return _CudaMark(time.process_time(), event)


def _saved_bytes(method: Method, batch: Batch) -> int:
    """Of each storage once: what autograd saved, and what custom functions hang on their context besides."""
    tokens = prepare(method, batch)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = method.forward(tokens)
    saved.extend(_tensors_on_contexts(output.grad_fn))
    weights = {parameter.untyped_storage().data_ptr() for parameter in method.module.parameters()}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    output.backward(batch.upstream)
    return sum(size for pointer, size in storages.items() if pointer not in weights)


def _tensors_on_contexts(root: Any) -> Iterator[Tensor]:
    seen, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(parent for parent, _ in node.next_functions)
        yield from _tensors_in(vars(node) if hasattr(node, "__dict__") else {})


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _tensors_in([getattr(value, name) for name in value.__dataclass_fields__])


def _peak_bytes(method: Method, batch: Batch) -> int | None:
    if batch.tokens.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run_once(method, batch)
        return torch.cuda.max_memory_allocated() - before
    growths = [_growth(method, batch) for _ in range(NUM_PEAKS)]
    return None if None in growths else int(median(growth for growth in growths if growth is not None))


def _growth(method: Method, batch: Batch) -> int | None:
    """Of the resident memory at its highest; None where Linux does not let a process reset that mark."""
    method.module.zero_grad(set_to_none=True)
    # What earlier runs freed but the allocator kept would hide the growth.
    ctypes.CDLL(None).malloc_trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = _status("VmRSS")
    run_once(method, batch)
    return _status("VmHWM") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {field} in /proc/self/status")

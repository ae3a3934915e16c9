"""What one rank saw itself of a training run, for comparing with what the run wrote down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

import ds_hybrid
from ds_hybrid.dispatch.spans import is_in_backward
from ds_hybrid.dispatch.traffic import WireShape
from ds_hybrid.engine import observer
from ds_hybrid.moe.layer import MoE
from ds_hybrid.placement import ExpertPlacement
from tests.multirank import explicit
from tests.multirank.test_moving_experts import loss_of
from tests.multirank.training import Run


@dataclass(frozen=True)
class Seen:
    """What one rank saw itself.

    Attributes:
        losses: of each micro-batch, what backward was given.
        ids: for each layer and micro-batch of training, the [T, K] choices of the tokens that this rank has.
        shapes, placements: by layer.
        groups: the expert-parallel groups.
        batch_size: of a step, as DeepSpeed counts samples.
        num_skipped: optimizer steps whose gradients overflowed.
        attention_bytes: that left this rank for keys and values, and their gradients.
        num_gathered: how often the observer gathered something.
    """

    losses: list[float]
    ids: list[list[np.ndarray]]
    shapes: dict[str, WireShape]
    placements: dict[str, ExpertPlacement]
    groups: list[list[int]]
    batch_size: int
    num_skipped: int
    attention_bytes: int
    num_gathered: int


@contextmanager
def watched_routers(layers: dict[str, Any]) -> Iterator[list[list[np.ndarray]]]:
    """The choices, for each layer and training forward; evaluation and recomputation apart."""
    ids: list[list[np.ndarray]] = [[] for _ in layers]

    def note(number: int) -> Any:
        def hook(router: nn.Module, _: Any, output: Any) -> None:
            if router.training and not is_in_backward():
                chosen = output.routing.topk_ids if hasattr(output, "routing") else output[1]
                ids[number].append(chosen.numpy().copy())

        return hook

    routers = [layer.deepspeed_moe.gate if isinstance(layer, MoE) else layer.router for layer in layers.values()]
    hooks = [router.register_forward_hook(note(number)) for number, router in enumerate(routers)]
    yield ids
    for hook in hooks:
        hook.remove()


@contextmanager
def watched(engine: Any, losses: list[float]) -> Iterator[list[Seen]]:
    """Gives what was seen at the end of the block."""
    layers, shared = engine.moe_layers_by_name(), engine.sequence_parallel
    seen: list[Seen] = []
    backward = engine.backward

    def attention_bytes() -> int:
        return 0 if shared is None else shared.attention.group.meter.training_total().payload

    before = attention_bytes()

    def noted(loss: Tensor, *arguments: Any, **options: Any) -> Any:
        losses.append(float(loss.detach()))
        return backward(loss, *arguments, **options)

    gather, num_gathered = observer.dist.gather_object, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_gathered
        num_gathered += 1
        return gather(*arguments, **options)

    engine.backward = noted
    with watched_routers(layers) as ids, pytest.MonkeyPatch.context() as patch:
        patch.setattr(observer.dist, "gather_object", counted)
        yield seen
    del engine.backward
    seen.append(
        Seen(
            losses,
            ids,
            {name: layer.switch.shape for name, layer in layers.items()},
            {name: layer.placement for name, layer in layers.items()},
            next(iter(engine._expert_groups.values())),
            engine.train_batch_size(),
            engine.skipped_steps,
            attention_bytes() - before,
            num_gathered,
        )
    )


def engine_of(model: Any, document: dict[str, Any], folder: Path | None, interval: int = 2) -> Any:
    """With everything written to ``folder``; None: nothing."""
    observe = {"directory": str(folder), "interval": interval, "routing_trace": True} if folder is not None else {}
    config = document | {"ds_hybrid": document.get("ds_hybrid", {}) | {"observe": observe}}
    return ds_hybrid.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def loads_of(ranks: list[Seen], calls: Sequence[int]) -> list[list[int]]:
    """[L, E] (token, choice) pairs of some micro-batches, of ``ranks`` together."""
    return [
        np.bincount(
            np.concatenate([seen.ids[number][call].ravel() for seen in ranks for call in calls]),
            minlength=shape.num_experts,
        ).tolist()
        for number, shape in enumerate(ranks[0].shapes.values())
    ]


def train(engine: Any, run: Run | explicit.Setup, steps: range) -> None:
    for step in steps:
        for micro in range(run.accumulation):
            engine.backward(loss_of(engine, run, step, micro))
            engine.step()

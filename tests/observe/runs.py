"""A made-up run for tests of what reads one: 2 hosts, 4 ranks, 2 layers of 8 experts, EP 2, with a rebalance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ds_hybrid.observe.events import (
    EVENTS_FILE,
    TIMELINE_FILE,
    DispatcherRecord,
    ExpertGroups,
    GainRecord,
    LayerDecision,
    LayerFacts,
    LayerStep,
    RankSpans,
    RebalanceRecord,
    Record,
    ResumeRecord,
    RunRecord,
    StepRecord,
    TimelineRecord,
)

LAYERS = ("model.layers.0.mlp", "model.layers.1.mlp")
AT_FIRST = ((0, 1, 2, 3), (4, 5, 6, 7))
MOVED = ((0, 5, 2, 3), (4, 1, 6, 7))
BEGAN = 1_790_000_000.0
INTERVAL = 10
MOVED_AT = 30


def run_record(**changes: Any) -> RunRecord:
    facts = {
        "num_experts": 8,
        "top_k": 2,
        "hidden_size": 32,
        "ep_size": 2,
        "mode": "two_stage",
        "candidates": ("alltoall", "allgather", "two_stage"),
        "expert_of_slot": AT_FIRST,
    }
    fields: dict[str, Any] = {
        "time": BEGAN,
        "step": 0,
        "ds_config": {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}},
        "versions": {"python": "3.11.2", "torch": "2.13.0", "deepspeed": "0.19.8", "ds_hybrid": "0.1.0"},
        "model": "Qwen3MoeForCausalLM",
        "device": "cpu",
        "world_size": 4,
        "node_of_rank": ("node-a", "node-a", "node-b", "node-b"),
        "expert_groups": (ExpertGroups(ep_size=2, ep_groups=((0, 1), (2, 3)), edp_groups=((0, 2), (1, 3))),),
        "layers": tuple(LayerFacts(name=name, **facts) for name in LAYERS),
        "nvlink": "the accelerator is a CPU",
    }
    return RunRecord(**(fields | changes))


def step_record(step: int, **changes: Any) -> StepRecord:
    """Ten steps of 4 x 2 x 32 tokens; layer 0 is skewed until ``MOVED_AT``, and expert 1 is the busiest there."""
    draw = np.random.default_rng(step)
    tokens, seconds = INTERVAL * 4 * 2 * 32, 1.25
    layers = []
    for number, name in enumerate(LAYERS):
        shares = np.array([1, 2.5, 1, 1.2, 0.6, 0.5, 0.6, 0.6]) if number == 0 else np.ones(8)
        load = draw.multinomial(2 * tokens, shares / shares.sum())
        placement = MOVED if number == 0 and step > MOVED_AT else AT_FIRST
        rank_load = load[np.array(placement)].sum(1)
        part = load / load.sum()
        layers.append(
            LayerStep(
                name=name,
                mode="two_stage" if number == 0 or step <= 20 else "allgather",
                load=load.tolist(),
                load_max_over_mean=float(load.max() / load.mean()),
                load_entropy=float(-(part * np.log(part)).sum() / np.log(8)),
                rank_load=rank_load.tolist(),
                rank_load_max_over_mean=float(rank_load.max() / rank_load.mean()),
                expert_seconds=(rank_load * 2e-6).tolist(),
                expert_time_max_over_mean=float(rank_load.max() / rank_load.mean()),
                arrived=(rank_load // 2).tolist(),
                wire_bytes={"two_stage": 900_000} if number == 0 else {"two_stage": 300_000, "allgather": 700_000},
                lower_bound=850_000,
                lower_bound_ratio=900 / 850 if number == 0 else 1000 / 850,
                exposed_seconds=0.4,
            )
        )
    fields: dict[str, Any] = {
        "time": BEGAN + 1.5 * step / INTERVAL,
        "step": step,
        "samples": 8 * step,
        "num_steps": INTERVAL,
        "seconds": seconds,
        "loss": 5.5 - 0.02 * step + float(draw.normal(0, 0.02)),
        "lr": (1e-3,),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "exposed_fraction": 0.8 / (4 * seconds),
        "load_max_over_mean": max(layer.load_max_over_mean or 0.0 for layer in layers),
        "wire_bytes_per_token": 1_900_000 / tokens,
        "lower_bound_ratio": 1900 / 1700,
        "layers": tuple(layers),
        "host_memory": (900_000_000, 910_000_000, 890_000_000, 905_000_000),
    }
    return StepRecord(**(fields | changes))


def rebalance_record(**changes: Any) -> RebalanceRecord:
    fields: dict[str, Any] = {
        "time": BEGAN + 4.5,
        "step": MOVED_AT,
        "action": "moved",
        "decisions": (decision(LAYERS[0], 1.42, 1.05, 2, pays=True), decision(LAYERS[1], 1.01, 1.0, 0, pays=False)),
        "reason": "the moves of 1 layer pay",
        "num_moved": 2,
        "seconds": 0.052,
        "predicted_seconds": 0.031,
        "bytes_sent": 123_456,
        "placements": {LAYERS[0]: MOVED},
    }
    return RebalanceRecord(**(fields | changes))


def decision(layer: str, before: float, after: float, num_moved: int, *, pays: bool) -> LayerDecision:
    return LayerDecision(
        layer=layer,
        load_before=before,
        load_after=after,
        load_bound=1.0,
        hottest_expert=1,
        hottest_load=0.62,
        num_moved=num_moved,
        num_moved_across=0,
        predicted_gain=0.004 if pays else 0.0,
        predicted_cost=0.031 if pays else 0.0,
        pays=pays,
        reason="earned back in 11 steps" if pays else "no better placement",
    )


def timeline_record(step: int) -> TimelineRecord:
    """One forward and backward: ranks differ in how long their experts take, and wait for each other in combine."""
    names = ("forward", "backward", "optimizer", "router", "plan", "dispatch", "experts", "combine", "wait")
    ranks = []
    for rank in range(4):
        rows: list[tuple[int, int, int, int, int, int]] = []

        def add(name: str, phase: int, layer: int, start: int, us: int, exposed: int = 0, rows: Any = rows) -> None:
            rows.append((names.index(name), phase, layer, start, us, exposed))

        busy = 9_000 if rank % 2 == 0 else 6_000
        add("forward", 0, -1, 0, 48_000, 2 * (9_500 - busy + 500))
        add("backward", 1, -1, 48_500, 90_000, 2 * (9_500 - busy + 900))
        add("optimizer", 3, -1, 139_000, 12_000)
        for layer in range(2):
            at = 6_000 + 21_000 * layer
            for name, us, exposed in (
                ("router", 600, 0),
                ("plan", 900, 500),
                ("dispatch", 2_000, 800),
                ("experts", busy, 0),
                ("combine", 1_500 + 9_000 - busy, 9_500 - busy),
            ):
                add(name, 0, layer, at, us, exposed)
                if exposed:
                    add("wait", 0, layer, at + us - exposed - 50, exposed, exposed)
                at += us
            at = 52_000 + 42_000 * (1 - layer)
            for name, us, exposed in (
                ("combine", 2_000, 900),
                ("experts", 2 * busy, 0),
                ("dispatch", 1_500 + 9_000 - busy, 9_500 - busy),
            ):
                add(name, 1, layer, at, us, exposed)
                if exposed:
                    add("wait", 1, layer, at + us - exposed - 50, exposed, exposed)
                at += us
        ranks.append(RankSpans(rank=rank, **dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True))))
    return TimelineRecord(
        time=BEGAN + 1.5 * step / INTERVAL,
        step=step,
        seconds=0.151,
        names=names,
        phases=("forward", "backward", "recompute", "step"),
        layers=LAYERS,
        ranks=tuple(ranks),
    )


_COLUMNS = ("name", "phase", "layer", "start_us", "us", "exposed_us")


def all_events() -> list[Record]:
    """Sixty steps: another dispatcher for layer 1 at 20, experts of layer 0 moved at 30, a resume at 40."""
    return [
        run_record(),
        step_record(10),
        DispatcherRecord(
            time=BEGAN + 3.0,
            step=20,
            layer=LAYERS[1],
            before="two_stage",
            after="allgather",
            predicted_seconds={"alltoall": 0.004, "allgather": 0.0021, "two_stage": 0.0027},
            reason="allgather is predicted to take 2.100 ms, two_stage 2.700 ms",
        ),
        step_record(20),
        rebalance_record(),
        step_record(30),
        step_record(40),
        step_record(50, loss=99.0),  # was not saved
        run_record(time=BEGAN + 100),
        ResumeRecord(
            time=BEGAN + 101,
            step=40,
            path="runs/checkpoints/global_step40",
            placements={LAYERS[0]: MOVED, LAYERS[1]: AT_FIRST},
        ),
        step_record(50),
        GainRecord(time=BEGAN + 103, step=60, layer=LAYERS[0], moved_at=30, predicted=0.004, measured=0.0036),
        rebalance_record(
            time=BEGAN + 103,
            step=60,
            action="stays",
            decisions=(decision(LAYERS[0], 1.05, 1.05, 0, pays=False),),
            reason="no layer's moves pay",
            num_moved=0,
            seconds=None,
            predicted_seconds=None,
            bytes_sent=None,
            placements={},
        ),
        step_record(60),
    ]


def write_run(folder: Path) -> Path:
    """The run of :func:`all_events` in ``folder``, with timelines of every interval."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / EVENTS_FILE, all_events())
    write_lines(folder / TIMELINE_FILE, [timeline_record(step) for step in range(INTERVAL, 70, INTERVAL)])
    return folder


def write_lines(path: Path, records: list[Any]) -> None:
    path.write_text("".join(record.to_line() + "\n" for record in records))

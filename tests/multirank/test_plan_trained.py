"""Plans trained by launch/train.py's own functions: they need the memory that was predicted."""

from __future__ import annotations

import gc
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ds_hybrid
from ds_hybrid.plan.candidate import Candidate, Workload
from ds_hybrid.plan.ds_config import to_ds_config
from ds_hybrid.plan.machine import read_machine
from ds_hybrid.plan.memory import memory
from ds_hybrid.plan.model_file import model_from_config
from ds_hybrid.plan.report import header
from ds_hybrid.plan.routing import RoutingLaw, read_routing
from ds_hybrid.plan.search import Estimator, Request
from ds_hybrid.plan.traffic import tensor_parallel_traffic
from tests.multirank.sent_bytes import counted_collectives, dispatched
from tests.ranks import RankPool

SEQ_LEN = 4096
FIELDS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
}
MODEL = model_from_config(FIELDS, label="tiny", file="tiny")
SAVING = {"checkpoints": True, "chunked_loss": True}
CASES = [
    (Candidate(4, 1, 2, 0, "two_stage"), 4),
    (Candidate(4, 1, 4, 1, "two_stage", **SAVING), 2),
    (Candidate(4, 1, 2, 2, "alltoall", **SAVING), 4),
    (Candidate(4, 1, 2, 3, "two_stage", **SAVING), 2),
    # A process that has had tensor parallelism cannot go back, so these are last.
    (Candidate(4, 2, 2, 1, "replicated", **SAVING), 4),
    (Candidate(4, 2, 4, 1, "two_stage"), 2),
]
"""Candidates, and bytes of a value."""


@pytest.mark.parametrize(
    ("candidate", "value_bytes"), CASES, ids=[f"{candidate.sizes}, {size} bytes" for candidate, size in CASES]
)
def test_the_fullest_moment_is_as_predicted(
    four_ranks: RankPool, tmp_path: Path, candidate: Candidate, value_bytes: int
) -> None:
    """To 20 %, for the rank that needs the most, with what was routed: when gradients are freed differs between runs.
    The savings' own are far beyond that.

    And the bytes that leave a rank beside dispatch.
    """
    work = Workload(SEQ_LEN, 1, value_bytes)
    machine = read_machine("a100x8_ib200")
    request = Request(MODEL, work, machine, machine.cluster(4), read_routing("zipf:1.0", MODEL))
    plan = header(request, Estimator(request)(candidate))
    (tmp_path / "mine.json").write_text(json.dumps(to_ds_config(MODEL, work, candidate, plan)))
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    (tmp_path / "text").write_text("To be, or not to be, that is the question: " * 20000)
    measured = four_ranks.run(peak_of_step, str(tmp_path))

    loads = np.sum([loads for _, loads, _ in measured], axis=0)
    law = RoutingLaw("as measured", MODEL.top_k * loads / loads.sum(1, keepdims=True), MODEL.num_moe_layers)
    predicted = memory(MODEL, work, candidate, law.demand(candidate.ep_size)).peak
    assert predicted == pytest.approx(max(peak for peak, *_ in measured), rel=0.2)

    if candidate.zero_stage < 3:  # which keeps what it has gathered of a model as small as this
        sent = sum(size for name, size in plan["predicted"]["wire_bytes_of_rank"].items() if name != "dispatch")
        # The layers' meters count shares of tokens that are joined again as dispatch.
        alike = replace(candidate, mode="replicated")
        joined = [tensor_parallel_traffic(MODEL, work, one).num_bytes for one in (candidate, alike)]
        assert [num_sent for *_, num_sent in measured] == pytest.approx([sent - joined[0] + joined[1]] * 4, rel=1e-4)


def test_without_savings_the_prediction_would_be_another() -> None:
    """A control: what a plan asks for is more than the tolerance."""
    demand = read_routing("uniform", MODEL).demand(2)
    for value_bytes in (2, 4):
        work = Workload(SEQ_LEN, 1, value_bytes)
        peaks = [
            memory(MODEL, work, replace(CASES[3][0], checkpoints=checkpoints, chunked_loss=chunked), demand).peak
            for checkpoints, chunked in ((True, True), (True, False), (False, True))
        ]
        assert min(peaks[1:]) > 1.3 * peaks[0]


def peak_of_step(folder: str) -> tuple[int, list[list[int]], int]:
    """Of this rank's second step: bytes of torch's allocator at its fullest moment, loads [layers, E] up to then, and
    bytes that left the rank, but for dispatch (not counted at ZeRO 3).
    """
    import train

    files = {"--deepspeed_config": "mine.json", "--model": "config.json", "--text": "text"}
    named = [word for option, file in files.items() for word in (option, f"{folder}/{file}")]
    options = train.parse_options([*named, "--seq-len", str(SEQ_LEN), "--eval-batches", "1"])
    gc.collect()
    with torch.profiler.profile(profile_memory=True) as profiler:
        corpus, config, savings = train.read_inputs(options)
        model = train.build_model(config, 0)
        savings.apply(model)
        engine, *_ = ds_hybrid.initialize(
            model=model, model_parameters=model.parameters(), config=options.deepspeed_config
        )
        data = train.share_out(engine, corpus, options)
        train.train_step(engine, data, 0)
        before = dispatched(engine)
        counting = counted_collectives() if engine.zero_optimization_stage() < 3 else nullcontext([])
        with torch.profiler.record_function("second step"), counting as sent:
            train.train_step(engine, data, 1)
    num_sent = sum(sent) - (dispatched(engine) - before)
    loads = [layer.expert_load.tolist() for layer in engine.module.modules() if hasattr(layer, "expert_load")]
    engine.destroy()
    del engine, model
    gc.collect()
    trace = Path(folder) / f"{dist.get_rank()}.json"
    profiler.export_chrome_trace(str(trace))
    return fullest(json.loads(trace.read_text())["traceEvents"], "second step"), loads, num_sent


def fullest(events: list[dict[str, Any]], name: str) -> int:
    """Bytes allocated at the fullest moment of the range ``name``, of what was allocated while profiling."""
    (during,) = (event for event in events if event["name"] == name and event.get("ph") == "X")
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    allocated = np.cumsum([num_bytes for _, num_bytes in changes])
    times = np.array([time for time, _ in changes])
    return int(allocated[(times >= during["ts"]) & (times <= during["ts"] + during["dur"])].max())

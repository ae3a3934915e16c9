"""What a search found, as text for people and as JSON for programs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ds_hybrid.plan.article import ArticleChoice, why_it_differs
from ds_hybrid.plan.candidate import LOSS_CHUNK, Candidate
from ds_hybrid.plan.memory import memory
from ds_hybrid.plan.routing import limits_left_out
from ds_hybrid.plan.search import Estimate, Findings, Request
from ds_hybrid.plan.traffic import tensor_parallel_traffic, zero_traffic

NUM_SHOWN = 10
_GB = 1e9

NOTES = (
    "Times and memory are predictions from the tables' numbers and assumptions (docs/planner.md), not measurements.",
    "Every plan takes the same sequences in a step; x is gradient_accumulation_steps. GB sent: of a rank in a step; "
    "/bound: of dispatch alone.",
)
SCRIPT_NOTE = (
    'What "asks for" names is the training script\'s to do: checkpoints = model.gradient_checkpointing_enable(), '
    f"loss = logits of {LOSS_CHUNK} tokens at a time. launch/train.py does it where a file of --write asks for it."
)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The article's layout beside ours; ``estimate`` is what is predicted of it, or why it cannot be run."""

    choice: ArticleChoice
    estimate: Estimate | str


def needs(candidate: Candidate) -> list[str]:
    """What a candidate asks of the training script."""
    return ["checkpoints"] * candidate.checkpoints + ["loss in chunks"] * candidate.chunked_loss


def header(request: Request, estimate: Estimate) -> dict[str, Any]:
    """What goes under ``ds_hybrid.plan``: ``needs`` is what launch/train.py does beside the ds_config."""
    candidate = estimate.candidate
    loss_chunk = LOSS_CHUNK if candidate.chunked_loss else 0
    return {
        "needs": {"activation_checkpoints": candidate.checkpoints, "loss_chunk": loss_chunk},
        "inputs": inputs(request),
        "predicted": predicted(request, estimate),
    }


def reason(estimate: Estimate) -> str:
    """Why it is where it is, in a line: what its time goes to, and where its groups lie."""
    parts = ", ".join(f"{name.replace('_', ' ')} {100 * share:.0f} %" for name, share in estimate.shares[:3])
    if estimate.candidate.ep_size == 1:
        return f"{parts}; every rank has all experts"
    hosts = estimate.num_hosts_of_group
    where = "inside hosts" if hosts == 1 else f"over {hosts} hosts"
    return f"{parts}; EP groups {where}"


def to_text(request: Request, findings: Findings, comparison: Comparison | None) -> str:
    """Head, dropped combinations, the ten best, the article's choice if asked for, and notes."""
    return "\n".join(
        [
            *_head(request),
            *_dropped(findings),
            "",
            *_table(request, findings),
            *(_article(request, findings, comparison) if comparison else ()),
            "",
            *_notes(request, findings),
            *limits_left_out(request.model),
        ]
    )


def to_json(request: Request, findings: Findings, comparison: Comparison | None) -> dict[str, Any]:
    """All figures: bytes, seconds and tokens per second."""
    document: dict[str, Any] = {
        "inputs": inputs(request),
        "num_combinations": findings.num_combinations,
        "dropped": dict(findings.dropped),
        "fits": bool(findings.fitting),
        "left_out": limits_left_out(request.model),
        "plans": [predicted(request, estimate) for estimate in (findings.fitting or findings.nearest)[:NUM_SHOWN]],
    }
    if comparison:
        estimate = comparison.estimate
        document["article"] = {
            **asdict(comparison.choice),
            "predicted": None if isinstance(estimate, str) else predicted(request, estimate),
            "why_ours_differs": _difference(request, findings, comparison),
        }
    return document


def inputs(request: Request) -> dict[str, Any]:
    """What was asked for."""
    return {
        "model": request.model.name,
        "cluster": request.machine.name,
        "world_size": request.cluster.num_ranks,
        "num_hosts": len(request.cluster.hosts),
        "routing": request.law.name,
        "zero_stages": list(request.zero_stages),
        "sequences_of_step": request.num_sequences,
        **asdict(request.work),
    }


def predicted(request: Request, estimate: Estimate) -> dict[str, Any]:
    """What is predicted of one candidate."""
    return {
        **asdict(estimate.candidate),
        "needs": needs(estimate.candidate),
        "reason": reason(estimate),
        "tokens_per_second": estimate.tokens_per_second,
        "step_seconds": {"total": estimate.time.total, **asdict(estimate.time)},
        "memory_bytes": {"peak": estimate.memory.peak, "of": request.machine.memory_bytes, **asdict(estimate.memory)},
        "memory_bytes_with_eager_attention": _eager_peak(request, estimate),
        "dispatch_bytes_of_layer": estimate.dispatch.wire_bytes,
        "wire_bytes_of_rank": wire_bytes(request, estimate),
        "dispatch_over_lower_bound": estimate.dispatch.ratio,
        "load_max_over_mean": estimate.demand.load,
        "load_max_over_mean_p99": estimate.demand.load_p99,
        "hosts_of_expert_group": estimate.num_hosts_of_group,
    }


def wire_bytes(request: Request, estimate: Estimate) -> dict[str, float]:
    """Bytes that leave a rank in a step, by the names of ``StepTime``; of dispatch the mean of its group."""
    model, work, candidate = request.model, request.work, estimate.candidate
    zero = zero_traffic(model, work, candidate)
    num_dispatches = model.num_moe_layers * candidate.num_dispatches
    return {
        "dispatch": num_dispatches * estimate.dispatch.wire_bytes / candidate.ep_size,
        "tensor_parallel": tensor_parallel_traffic(model, work, candidate).num_bytes,
        "sequence_parallel": candidate.micro_batches * estimate.gathered.wire_bytes,
        "reduction": sum(kind.reduction.num_bytes for kind in zero),
        "gathers": sum(kind.gathers.num_bytes for kind in zero),
    }


def _head(request: Request) -> Iterator[str]:
    model, work, machine = request.model, request.work, request.machine
    yield (
        f"{model.name}: {model.num_parameters / 1e9:.3g} B parameters, {model.num_active_parameters / 1e9:.3g} B "
        f"active; {model.num_moe_layers} MoE layers of {model.num_experts} experts, top-{model.top_k}"
    )
    yield (
        f"{request.cluster.num_ranks} ranks on {len(request.cluster.hosts)} hosts of {machine.name}, "
        f"{_gb(machine.memory_bytes)} GB usable on each rank"
    )
    yield (
        f"{request.num_sequences} sequences a step, in micro-batches of {work.micro_batch} x {work.seq_len} tokens; "
        f"{work.attention} attention, routing {request.law.name}"
    )


def _dropped(findings: Findings) -> Iterator[str]:
    yield ""
    yield f"{findings.num_combinations} combinations, of which"
    for why, count in findings.dropped.items():
        yield f"  {count:6d} {why}"


def _table(request: Request, findings: Findings) -> Iterator[str]:
    if not findings.fitting:
        yield "None of these fits; those that need the least memory:"
    yield (
        "   TP  SP  EP ZeRO   x dispatcher    tokens/s    step s  GB (eager)      GB sent (dispatch)  /bound  "
        "load (p99)   asks for / why"
    )
    for number, estimate in enumerate((findings.fitting or findings.nearest)[:NUM_SHOWN], 1):
        candidate = estimate.candidate
        ratio = "-" if estimate.dispatch.ratio is None else f"{estimate.dispatch.ratio:.3f}"
        peaks = f"{_gb(estimate.memory.peak)} ({_gb(_eager_peak(request, estimate))})"
        sent = wire_bytes(request, estimate)
        of_rank = f"{_gb(sum(sent.values()))} ({_gb(sent['dispatch'])})"
        load = f"{estimate.demand.load:.2f} ({estimate.demand.load_p99:.2f})"
        yield (
            f"{number:2d} {candidate.tp_size:2d} {candidate.sp_size:3d} {candidate.ep_size:3d} "
            f"{candidate.zero_stage:4d} {candidate.micro_batches:3d} "
            f"{candidate.mode if candidate.ep_size > 1 else '-':12s} {estimate.tokens_per_second:9,.0f} "
            f"{estimate.time.total:9.3g}  {peaks:15s} {of_rank:18s} {ratio:>7s}  "
            f"{load:12s} {', '.join(needs(candidate)) or 'nothing'}"
        )
        yield f"   {reason(estimate)}"


def _article(request: Request, findings: Findings, comparison: Comparison) -> Iterator[str]:
    choice = comparison.choice
    yield ""
    yield (
        f"The article: its formula gives TP {choice.formula_tp} (as printed it can only give 1 or 16); for "
        f"{request.work.seq_len} tokens its text takes plan {choice.plan}: TP {choice.tp_size}, EP {choice.ep_size}"
        f"{' on the TP groups' if choice.plan == 'A' else ''}."
    )
    estimate = comparison.estimate
    if not isinstance(estimate, str):
        yield (
            f"Predicted with ZeRO {estimate.candidate.zero_stage}: {estimate.tokens_per_second:,.0f} tokens/s, "
            f"{_gb(estimate.memory.peak)} GB."
        )
    yield _difference(request, findings, comparison)


def _difference(request: Request, findings: Findings, comparison: Comparison) -> str:
    estimate = comparison.estimate
    if isinstance(estimate, str):
        return f"It cannot be run here: such layouts {estimate}."
    if not findings.fitting:
        return "Ours takes none, as nothing fits."
    ours = findings.fitting[0]
    if ours.candidate == estimate.candidate:
        return "Ours takes the same."
    mode = f", {ours.candidate.mode}" if ours.candidate.ep_size > 1 else ""
    taken = f"Ours takes {ours.candidate.sizes}{mode},"
    if estimate.memory.peak > request.machine.memory_bytes:
        needed = f"{_gb(estimate.memory.peak)} GB of {_gb(request.machine.memory_bytes)} GB"
        return f"It does not fit: it needs {needed}. {taken} predicted {ours.tokens_per_second:,.0f} tokens/s."
    ratio = ours.tokens_per_second / estimate.tokens_per_second
    return f"{taken} predicted {ratio:.2f} times as fast: {why_it_differs(estimate, ours)}"


def _notes(request: Request, findings: Findings) -> Iterator[str]:
    if not findings.fitting:
        yield _nothing_fits(request, findings)
    if any(needs(estimate.candidate) for estimate in (findings.fitting or findings.nearest)[:NUM_SHOWN]):
        yield SCRIPT_NOTE
    yield from NOTES


def _nothing_fits(request: Request, findings: Findings) -> str:
    if not findings.nearest:
        return "No sizes can be run at all; the reasons are above."
    best = findings.nearest[0].memory
    states = best.states
    parts = {
        "weights": states.weights,
        "optimizer": states.optimizer,
        "gradients": states.gradients + states.buffers,
        "activations": best.activations,
        "logits": best.logits,
        "one layer": best.layer + best.gathered,
    }
    ways = "more ranks, or shorter sequences" if 3 in request.zero_stages else "a higher --zero-stage, or more ranks"
    return (
        f"Nothing fits. The least is {_gb(best.peak)} GB of {_gb(request.machine.memory_bytes)}: "
        f"{', '.join(f'{name} {_gb(size)}' for name, size in parts.items())}, not all at one time. Take {ways}."
    )


def _gb(num_bytes: float) -> str:
    """In GB, three digits or all before the point."""
    size = num_bytes / _GB
    return f"{size:,.0f}" if size >= 100 else f"{size:.3g}"


def _eager_peak(request: Request, estimate: Estimate) -> float:
    """Attention that keeps all scores; where ranks share sequences out there is none."""
    if estimate.candidate.sp_size > 1:
        return estimate.memory.peak
    work = replace(request.work, attention="eager")
    return memory(request.model, work, estimate.candidate, estimate.demand).peak

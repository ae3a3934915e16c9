"""The records that a run writes about itself, one JSON object a line. docs/observe.md explains the fields.

``events.jsonl`` holds all kinds but ``timeline``, which fills ``timeline.jsonl``. Within a version, fields may be added
and readers pass over those that they do not know; a field that goes away or changes its meaning, and a new kind of
record, raise ``SCHEMA_VERSION``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from ds_hybrid.problems import value_at

SCHEMA_VERSION: Final = 1
EVENTS_FILE: Final = "events.jsonl"
TIMELINE_FILE: Final = "timeline.jsonl"

Action = Literal["moved", "dry_run", "too_costly", "stays", "failed", "off", "called"]
"""What came of a decision: experts moved; would have; would have, but interrupting the run costs more than it brings;
no layer's moves pay; a rank could not move them; nothing will be decided any more; ``engine.move_experts`` was
called."""

Phase = Literal["forward", "backward", "recompute", "step"]
"""``recompute`` is a forward that activation checkpointing repeats inside a backward; ``step`` follows the last
backward of an optimizer step."""

WAIT: Final = "wait"
"""The name of spans in which a rank stands still for a message: exposed communication. They lie inside other spans."""


class _Part(BaseModel):
    # Numbers that JSON lacks are "NaN" and "Infinity". A mistake in a record is a bug; so the file is read leniently.
    model_config = ConfigDict(frozen=True, extra="ignore", ser_json_inf_nan="strings")


class Record(_Part):
    """One line.

    Attributes:
        version: of the schema.
        time: seconds since 1970, on rank 0's clock.
        step: optimizer steps of the run so far.
    """

    version: int = SCHEMA_VERSION
    time: float
    step: int

    def to_line(self) -> str:
        """As it stands in the file, without the line's end."""
        return self.model_dump_json()


class LayerFacts(_Part):
    """A MoE layer as the run began.

    Attributes:
        name: in the model.
        ep_size: ranks of its expert-parallel group, P.
        mode: its dispatcher.
        candidates: the modes that it may take; more than one where ``dispatch.mode`` is ``auto``.
        expert_of_slot: [P][E/P], the logical experts of each place in the expert-parallel group.
    """

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    ep_size: int
    mode: str
    candidates: tuple[str, ...]
    expert_of_slot: tuple[tuple[int, ...], ...]


class ExpertGroups(_Part):
    """The groups of one expert-parallel size.

    Attributes:
        ep_size: P.
        ep_groups: lists of P ranks; place p of a layer's placement is the p-th rank of each.
        edp_groups: lists of ranks that hold the same experts, by place.
    """

    ep_size: int
    ep_groups: tuple[tuple[int, ...], ...]
    edp_groups: tuple[tuple[int, ...], ...]


class RunRecord(Record):
    """A process group began to train. A resumed run writes one too, and a ``resume`` after it. Its ``step`` is 0.

    Attributes:
        ds_config: the whole ds_config, without secrets.
        versions: of packages, by name.
        model: the class of the model.
        device: the accelerator's name, such as "cpu".
        node_of_rank: [R], the name of the host of each rank.
        expert_groups: for each expert-parallel size.
        layers: in model order.
        nvlink: None where NVLink use is measured on the host of rank 0, else why not.
    """

    kind: Literal["run"] = "run"
    ds_config: Mapping[str, Any]
    versions: Mapping[str, str]
    model: str
    device: str
    world_size: int
    tp_size: int = 1
    node_of_rank: tuple[str, ...]
    expert_groups: tuple[ExpertGroups, ...]
    layers: tuple[LayerFacts, ...]
    nvlink: str | None = None

    def section(self, path: str) -> Mapping[str, Any]:
        """Of the ds_config, at a path such as "ds_hybrid.rebalance"; empty where there is none."""
        value = value_at(self.ds_config, path)
        return value if isinstance(value, Mapping) else {}


class ResumeRecord(Record):
    """A checkpoint was loaded; what was written of later steps is void, for they are made again.

    Attributes:
        path: of the checkpoint.
        placements: [P][E/P] logical experts, by layer.
    """

    kind: Literal["resume"] = "resume"
    path: str
    placements: Mapping[str, tuple[tuple[int, ...], ...]]


class LayerStep(_Part):
    """What one MoE layer did in training since the record before, all ranks together.

    Attributes:
        name: in the model.
        mode: its dispatcher at the end.
        load: [E], (token, choice) pairs that chose each logical expert.
        load_max_over_mean: the busiest expert over the mean; None when nothing was routed.
        load_entropy: Shannon entropy of the experts' shares over log E: 1 is even, 0 is one expert for all.
        rank_load: [P], the pairs of the experts at each place, by the placement that lasted longest.
        rank_load_max_over_mean: the busiest place over the mean.
        expert_seconds: [P], how long the experts of each place took in forward, replicas together.
        expert_time_max_over_mean: the slowest place over the mean; None when no time was taken.
        arrived: [P], tokens that reached each place's experts, its own among them.
        wire_bytes: that left a rank, forward and backward, metadata included, by the mode that sent them.
        lower_bound: bytes that had to.
        lower_bound_ratio: all wire bytes over ``lower_bound``; None when nothing had to.
        exposed_seconds: how long ranks stood still for messages, added up over the ranks.
    """

    name: str
    mode: str
    load: tuple[int, ...]
    load_max_over_mean: float | None
    load_entropy: float | None
    rank_load: tuple[int, ...]
    rank_load_max_over_mean: float | None
    expert_seconds: tuple[float, ...]
    expert_time_max_over_mean: float | None
    arrived: tuple[int, ...]
    wire_bytes: Mapping[str, int]
    lower_bound: int
    lower_bound_ratio: float | None
    exposed_seconds: float


class AttentionStep(_Part):
    """What attention over sequences that ranks share did in training since the record before, all ranks together.

    Attributes:
        wire_bytes: of keys, values and their gradients that left a rank, metadata (positions and padding) included.
        exposed_seconds: how long ranks stood still for them, added up over the ranks.
        exposed_fraction: that, as a part of the ranks' time.
    """

    wire_bytes: int
    exposed_seconds: float
    exposed_fraction: float | None


class GpuTraffic(_Part):
    """NVLink use of one GPU, as the mean since the record before, evaluation and checkpoints included.

    Attributes:
        host: its name.
        gpu: its index in nvidia-smi.
        sent, received: bytes per second; None where there is nothing to tell, with a ``reason``.
        fraction: of the links' speed, in the busier direction; None when the speed is unknown.
    """

    host: str
    gpu: int
    sent: float | None = None
    received: float | None = None
    fraction: float | None = None
    reason: str | None = None


class StepRecord(Record):
    """The training since the record before, the run's first record or the resume. Evaluation is left out, but for
    memory and NVLinks, which know no difference.

    Attributes:
        samples: of the run so far, DeepSpeed's ``global_samples``.
        num_steps: optimizer steps since the record before.
        seconds: that they took rank 0, without pauses for evaluation, checkpoints and this record.
        loss: what ``engine.backward`` was given, the mean over ranks, micro-batches and steps; None when it was not
            called.
        lr: by parameter group.
        tokens: that went through the MoE layers, all ranks together.
        tokens_per_second: over ``seconds``; None for none.
        exposed_fraction: the part of the ranks' time in which they stood still for messages of MoE layers.
        load_max_over_mean: of the layer where it is worst.
        wire_bytes_per_token: of all layers together.
        lower_bound_ratio: likewise.
        layers: in model order.
        attention: None where no ranks share sequences, or the run did not write it.
        host_memory: [R], bytes of each rank's process at this time.
        accelerator_memory: [R], the most bytes that each rank's tensors have had on its accelerator since the run
            began; None on CPUs.
        nvlink: of all GPUs of the hosts whose NVLinks can be read.
    """

    kind: Literal["step"] = "step"
    samples: int
    num_steps: int
    seconds: float
    loss: float | None
    lr: tuple[float, ...]
    tokens: int
    tokens_per_second: float | None
    exposed_fraction: float | None
    load_max_over_mean: float | None
    wire_bytes_per_token: float | None
    lower_bound_ratio: float | None
    layers: tuple[LayerStep, ...]
    attention: AttentionStep | None = None
    host_memory: tuple[int, ...]
    accelerator_memory: tuple[int, ...] | None = None
    nvlink: tuple[GpuTraffic, ...] = ()


class DispatcherRecord(Record):
    """A layer changed its dispatcher.

    Attributes:
        predicted_seconds: of a forward and backward of the layer in each mode that was weighed.
        reason: in words.
    """

    kind: Literal["dispatcher"] = "dispatcher"
    layer: str
    before: str
    after: str
    predicted_seconds: Mapping[str, float]
    reason: str


class LayerDecision(_Part):
    """What was thought of one layer's placement. Loads are the busiest rank's forecast over the ranks' mean.

    Attributes:
        load_before: where the experts are.
        load_after: where they would be.
        load_bound: the least that any placement reaches.
        hottest_expert, hottest_load: the busiest expert, and its load over a rank's mean: above 1 no placement can even
            out the layer.
        num_moved: experts that would change rank.
        num_moved_across: those of them that would change node.
        predicted_gain: seconds per step.
        predicted_cost: seconds, of the moves alone.
        pays: by itself.
        reason: why, or why not.
    """

    layer: str
    load_before: float
    load_after: float
    load_bound: float
    hottest_expert: int
    hottest_load: float
    num_moved: int
    num_moved_across: int
    predicted_gain: float
    predicted_cost: float
    pays: bool
    reason: str


class RebalanceRecord(Record):
    """The rebalancer looked at layers after this step, or experts were moved by a call.

    Attributes:
        decisions: of the layers that were looked at.
        reason: in words; for ``failed`` and ``off`` the error.
        num_moved: experts that changed their rank.
        seconds: that the event took on rank 0, measured; None where nothing moved.
        predicted_seconds: of the moves alone.
        bytes_sent: that left rank 0 for it.
        placements: [P][E/P] logical experts after it, by layer, for the layers that were moved.
    """

    kind: Literal["rebalance"] = "rebalance"
    action: Action
    decisions: tuple[LayerDecision, ...] = ()
    reason: str
    num_moved: int = 0
    seconds: float | None = None
    predicted_seconds: float | None = None
    bytes_sent: int | None = None
    placements: Mapping[str, tuple[tuple[int, ...], ...]] = Field(default_factory=dict)


class GainRecord(Record):
    """What an earlier move of one layer brought, measured with the tokens that came since, placed both ways.

    Attributes:
        moved_at: the step of that move.
        predicted, measured: seconds per step; below 0 it cost some.
    """

    kind: Literal["gain"] = "gain"
    layer: str
    moved_at: int
    predicted: float
    measured: float


class Span(_Part):
    """One piece of work of one rank.

    Attributes:
        name: "forward", "backward", "optimizer" and "rebalance" for the whole model; "router", "plan" (ranks tell each
            other what will move), "dispatch", "experts" and "combine" for a MoE layer; "attention_gather" for an
            attention layer; "wait".
        layer: its name; None for the whole model.
        start: seconds since the timeline's begin.
        seconds: its length.
        exposed: seconds of it in which the rank stood still for a message.
    """

    name: str
    phase: Phase
    layer: str | None
    start: float
    seconds: float
    exposed: float


class RankSpans(_Part):
    """The spans of one rank by columns: index of the name, of the phase and of the layer (-1 for none), and
    microseconds. :meth:`TimelineRecord.spans` puts them together.
    """

    rank: int
    name: tuple[int, ...]
    phase: tuple[int, ...]
    layer: tuple[int, ...]
    start_us: tuple[int, ...]
    us: tuple[int, ...]
    exposed_us: tuple[int, ...]


class TimelineRecord(Record):
    """All ranks in the step that ended as ``step``, on one clock that begins with the first span.

    Attributes:
        seconds: until the last span ends.
        names, phases, layers: what the columns' indices stand for.
        ranks: [R].
    """

    kind: Literal["timeline"] = "timeline"
    seconds: float
    names: tuple[str, ...]
    phases: tuple[Phase, ...]
    layers: tuple[str, ...]
    ranks: tuple[RankSpans, ...]

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Of one rank, in the order of their starts."""
        of = self.ranks[rank]
        columns = zip(of.name, of.phase, of.layer, of.start_us, of.us, of.exposed_us, strict=True)
        found = (
            Span.model_construct(  # of columns that were checked: there may be 100,000
                name=self.names[name],
                phase=self.phases[phase],
                layer=None if layer < 0 else self.layers[layer],
                start=start / 1e6,
                seconds=length / 1e6,
                exposed=exposed / 1e6,
            )
            for name, phase, layer, start, length, exposed in columns
        )
        return tuple(sorted(found, key=lambda span: (span.start, -span.seconds)))


AnyRecord = Annotated[
    RunRecord | ResumeRecord | StepRecord | DispatcherRecord | RebalanceRecord | GainRecord | TimelineRecord,
    Field(discriminator="kind"),
]

RECORDS: Final[TypeAdapter[AnyRecord]] = TypeAdapter(AnyRecord)
"""Reads any record."""

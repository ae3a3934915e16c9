"""Watches a training run, and every so many steps gathers on rank 0 what is written down and shown by monitors.

Between those steps nothing is exchanged and nothing waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from torch import Tensor, nn

from ds_hybrid.attention.hugging_face import SharedAttention, silent
from ds_hybrid.config import ObserveConfig
from ds_hybrid.dispatch.choose import DispatcherChange
from ds_hybrid.dispatch.spans import SILENT, LayerSpans, SpanLog, Spans
from ds_hybrid.dispatch.stopwatch import Instant, instant, seconds_between
from ds_hybrid.engine.agreement import raise_alike
from ds_hybrid.engine.moe_stats import StatsReader
from ds_hybrid.engine.routing_counts import RoutingCounts
from ds_hybrid.errors import EventsError
from ds_hybrid.moe.kinds import MoELayer
from ds_hybrid.observe.compose import (
    Progress,
    RankReport,
    dispatcher_records,
    rebalance_records,
    slots,
    step_record,
)
from ds_hybrid.observe.events import RebalanceRecord, Record, ResumeRecord, RunRecord
from ds_hybrid.observe.monitor import monitor_events, moved_event
from ds_hybrid.observe.nvlink import NotAvailable, NvlinkCounters, read_counters, use_between
from ds_hybrid.observe.routing_trace import RoutingTraceWriter
from ds_hybrid.observe.timeline import Timed, timeline_record
from ds_hybrid.observe.writer import RecordWriter
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance.look import Look
from ds_hybrid.rebalance.migrate import MoveReport
from ds_hybrid.topology.cluster import Cluster

WHOLE_MODEL = -1


class Unobserved:
    """What an engine calls when nobody watches. All ranks call the same methods after the same steps."""

    def loss(self, loss: Tensor, *, factor: int = 1) -> None:
        """Note the loss of a micro-batch, given to backward as a ``factor``-th of what it is."""

    def work(self, name: str, phase: str) -> AbstractContextManager[None]:
        """Notes a work of the whole model where a timeline is wanted."""
        return nullcontext()

    def pause(self) -> None:
        """What follows until the next training forward is no training. Collective."""

    def after_step(self, progress: Progress, changes: Sequence[DispatcherChange], look: Look | None) -> None:
        """An optimizer step is over, dispatchers have changed and experts moved. Collective at each interval."""

    def moved(self, step: int, targets: Mapping[str, ExpertPlacement], report: MoveReport, seconds: float) -> None:
        """``engine.move_experts`` has moved experts."""

    def resumed(self, step: int, path: str) -> None:
        """A checkpoint was loaded. Collective."""

    def close(self) -> None:
        """Nothing more is to come."""


class Observer(Unobserved):
    """Watches the engine of this rank.

    Args:
        layers: of the model, in one order on every rank.
        module: the whole model, whose forwards tell training from evaluation.
        monitor: DeepSpeed's, which writes on rank 0.
        cluster: the hosts; the first rank of each reads its NVLinks.
        attention: over sequences that ranks share; None: there is none.
        describe: gives the run's first record; its argument says why there is no NVLink use, if there is none.

    Raises:
        ConfigError: on every rank, when rank 0 cannot write the directory.
    """

    def __init__(
        self,
        config: ObserveConfig,
        layers: Sequence[MoELayer],
        module: nn.Module,
        monitor: Any,
        cluster: Cluster,
        describe: Callable[[str | None], RunRecord],
        attention: SharedAttention | None = None,
    ) -> None:
        self._interval = config.interval
        self._layers = {layer.layer_name: layer for layer in layers}
        self._attention = attention
        if attention is not None:
            attention.spans_of = self._spans_of_attention
        self._name_of = {part: name for name, part in module.named_modules()}
        self._attention_layers: list[nn.Module] = []
        self._monitor = monitor
        self._rank = dist.get_rank()
        self._stats = StatsReader(layers, training_alone=True)
        self._counts = RoutingCounts(layers) if config.routing_trace and layers else None
        self._draws_timeline = config.directory is not None and config.timeline
        self._writer: RecordWriter | None = None
        self._trace: RoutingTraceWriter | None = None
        if config.directory is not None:
            raise_alike(self._open(config.directory) if self._rank == 0 else [])
        host = next(host for host in cluster.hosts if self._rank in host.ranks)
        self._host = host.name
        counters = _read_nvlink() if self._rank == host.ranks[0] else None
        no_nvlink = counters.reason if isinstance(counters, NotAvailable) else None
        self._nvlink = None if no_nvlink is not None else counters
        self._loss, self._num_losses = torch.zeros((), device=get_accelerator().current_device_name()), 0
        self._log: SpanLog | None = None
        self._forward_began: Instant = None
        self._hooks = [
            module.register_forward_pre_hook(self._before_forward),
            module.register_forward_hook(self._after_forward),
        ]
        self._write(describe(no_nvlink))
        self._begin_window(step=0, is_paused=True)

    def _open(self, directory: str) -> list[str]:
        """Open the files of rank 0; why it cannot."""
        try:
            self._writer = RecordWriter(directory)
            if self._counts is not None:
                facts = {"top_k": [layer.top_k for layer in self._layers.values()]}
                self._trace = RoutingTraceWriter(directory, list(self._layers), facts)
        except EventsError as error:
            return [str(error)]
        except OSError as error:
            return [f'ds_hybrid.observe.directory = "{directory}": {error}. Name one that rank 0 can write.']
        return []

    def loss(self, loss: Tensor, *, factor: int = 1) -> None:
        self._loss += factor * loss.detach().sum()  # of one element, whatever its shape
        self._num_losses += 1

    @contextmanager
    def work(self, name: str, phase: str) -> Iterator[None]:
        begin = None if self._log is None else instant()
        try:
            yield
        finally:
            if self._log is not None and begin is not None:
                self._log.add(name, phase, WHOLE_MODEL, begin)
            self._mark = time.perf_counter()

    def pause(self) -> None:
        self._is_paused = True
        self._flush_trace()

    def after_step(self, progress: Progress, changes: Sequence[DispatcherChange], look: Look | None) -> None:
        now = time.time()
        self._write(*dispatcher_records(changes, time=now, step=progress.step))
        if look is not None:
            self._write(*rebalance_records(look, self._placements(), time=now, step=progress.step))
            if look.move is not None and self._rank == 0:
                self._monitor.write_events([moved_event(look.move.num_moved, progress.samples)])
        self._num_steps += 1
        if self._counts is not None:
            self._counts.after_step(progress.step)
        if progress.step % self._interval == 0:
            self._record(progress)
            dist.barrier()  # what rank 0 takes to write is not the others' waiting for tokens
            self._begin_window(step=progress.step)
        else:
            if self._counts is not None and self._counts.is_full:
                self._flush_trace()
            self._watch(step=progress.step)
            self._mark = time.perf_counter()

    def moved(self, step: int, targets: Mapping[str, ExpertPlacement], report: MoveReport, seconds: float) -> None:
        placements = self._placements()
        self._write(
            RebalanceRecord(
                time=time.time(),
                step=step,
                action="called",
                reason="engine.move_experts was called",
                num_moved=report.num_moved,
                seconds=seconds,
                bytes_sent=report.bytes_sent,
                placements={name: slots(placements[name]) for name in targets},
            )
        )

    def resumed(self, step: int, path: str) -> None:
        placements = {name: slots(placement) for name, placement in self._placements().items()}
        self._write(ResumeRecord(time=time.time(), step=step, path=path, placements=placements))
        self._stats.skip()
        self._loss.zero_()
        self._num_losses = 0
        if self._counts is not None:
            self._counts.skip()
        if self._trace is not None:
            self._trace.begin_part()
        self._begin_window(step=step, is_paused=True)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._attention is not None:
            self._attention.spans_of = silent
        self._watch(step=None)
        if self._writer is not None:
            self._writer.close()
        self._writer = self._trace = None

    def _placements(self) -> dict[str, ExpertPlacement]:
        return {name: layer.placement for name, layer in self._layers.items()}

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        if not module.training:
            self._is_paused = True
            return
        if self._is_paused:
            self._paused_seconds += time.perf_counter() - self._mark
            self._is_paused = False
        self._forward_began = None if self._log is None else instant()

    def _after_forward(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if module.training:
            if self._log is not None and self._forward_began is not None:
                self._log.add("forward", "forward", WHOLE_MODEL, self._forward_began)
            self._mark = time.perf_counter()

    def _begin_window(self, *, step: int, is_paused: bool = False) -> None:
        """Count from here: the next record is of what follows ``step``."""
        self._num_steps = 0
        self._paused_seconds = 0.0
        self._is_paused = is_paused
        self._watch(step=step)
        self._mark = self._began = time.perf_counter()

    def _watch(self, *, step: int | None) -> None:
        """Note the works of the step after ``step`` if its timeline is wanted."""
        is_wanted = self._draws_timeline and step is not None and (step + 1) % self._interval == 0
        self._log = SpanLog() if is_wanted else None
        for number, layer in enumerate(self._layers.values()):
            layer.meter.watched_by = SILENT if self._log is None else LayerSpans(self._log, number)

    def _spans_of_attention(self, layer: nn.Module) -> Spans:
        """Attention layers are numbered after the MoE layers, as they first run: in one order on all ranks."""
        if self._log is None:
            return SILENT
        if layer not in self._attention_layers:
            self._attention_layers.append(layer)
        return LayerSpans(self._log, len(self._layers) + self._attention_layers.index(layer))

    def _record(self, progress: Progress) -> None:
        """Gather everything on rank 0, and write it. Collective."""
        get_accelerator().synchronize()
        seconds = time.perf_counter() - self._began - self._paused_seconds
        stats = self._stats.take()
        # All ranks leave that exchange at about the same time, whatever their clocks say.
        spans = self._timed(since=instant())
        own = (self._report(), spans)
        gathered: list[Any] | None = [None] * dist.get_world_size() if self._rank == 0 else None
        dist.gather_object(own, gathered)
        self._flush_trace()
        if gathered is None:
            return
        record = step_record(
            stats,
            self._placements(),
            {name: layer.top_k for name, layer in self._layers.items()},
            [report for report, _ in gathered],
            progress,
            time=time.time(),
            num_steps=self._num_steps,
            seconds=seconds,
        )
        self._write(record)
        self._monitor.write_events(monitor_events(record))
        if self._log is not None:
            of_rank = [theirs for _, theirs in gathered]
            self._write(timeline_record(of_rank, self._layer_names(), time=record.time, step=progress.step))

    def _layer_names(self) -> list[str]:
        return [*self._layers, *(self._name_of.get(layer, "attention") for layer in self._attention_layers)]

    def _report(self) -> RankReport:
        accelerator = get_accelerator()
        loss, num_losses = float(self._loss), self._num_losses
        self._loss.zero_()
        self._num_losses = 0
        nvlink = None
        if self._nvlink is not None:
            now = read_counters()
            nvlink, self._nvlink = use_between(self._nvlink, now), now
        return RankReport(
            loss=loss,
            num_losses=num_losses,
            host_memory=psutil.Process().memory_info().rss,
            accelerator_memory=None if _is_cpu() else int(accelerator.max_memory_allocated()),
            host=self._host,
            nvlink=nvlink,
        )

    def _timed(self, *, since: Instant) -> list[Timed]:
        """This rank's spans, by seconds from ``since``. Waits for the device."""
        if self._log is None:
            return []
        get_accelerator().synchronize()
        return [
            Timed(
                note.name,
                note.phase,
                note.layer,
                start=-seconds_between(note.begin, since),
                seconds=seconds_between(note.begin, note.end),
            )
            for note in self._log.notes
        ]

    def _flush_trace(self) -> None:
        """Sum the pending counts over the ranks, and write them. Collective."""
        if self._counts is None:
            return
        steps, counts = self._counts.take()
        if self._trace is not None:
            with self._going_on():
                self._trace.append(steps, counts)

    def _write(self, *records: Record) -> None:
        if self._writer is not None:
            with self._going_on():
                for record in records:
                    self._writer.write(record)

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """A disk that is full ends what is written, not the training."""
        try:
            yield
        except OSError as error:
            assert self._writer is not None
            logger.warning(
                f"ds_hybrid: observe: {self._writer.directory}: {error}. Nothing more is written there; training goes "
                "on."
            )
            self._writer = self._trace = None


def _read_nvlink() -> NvlinkCounters:
    return NotAvailable("the accelerator is the CPU") if _is_cpu() else read_counters()


def _is_cpu() -> bool:
    return bool(get_accelerator().device_name() == "cpu")

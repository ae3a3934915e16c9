"""Watches a training run, and every so many steps gathers on rank 0 what is written down and shown by monitors.

Between those steps nothing is exchanged and nothing waits for the device.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from ds_hybrid.attention.hugging_face import SharedAttention
from ds_hybrid.config import ObserveConfig
from ds_hybrid.dispatch.choose import DispatcherChange
from ds_hybrid.dispatch.stopwatch import instant
from ds_hybrid.engine.agreement import raise_alike
from ds_hybrid.engine.moe_stats import StatsReader
from ds_hybrid.engine.outlet import Outlet
from ds_hybrid.engine.routing_counts import RoutingCounts
from ds_hybrid.engine.span_recorder import SpanRecorder
from ds_hybrid.engine.training_clock import TrainingClock
from ds_hybrid.engine.watcher import Watcher
from ds_hybrid.errors import EventsError
from ds_hybrid.moe.kinds import MoELayer
from ds_hybrid.observe.compose import (
    AttentionReport,
    Progress,
    RankReport,
    dispatcher_records,
    longest_placed,
    rebalance_records,
    slots,
    step_record,
)
from ds_hybrid.observe.events import RebalanceRecord, Record, ResumeRecord, RunRecord
from ds_hybrid.observe.monitor import change_events, look_events, monitor_events, moved_events
from ds_hybrid.observe.nvlink import NotAvailable, NvlinkCounters, read_counters, use_between
from ds_hybrid.observe.routing_trace import RoutingTraceWriter
from ds_hybrid.observe.timeline import is_kept, timeline_record
from ds_hybrid.observe.writer import RecordWriter
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance.look import Look
from ds_hybrid.rebalance.migrate import MoveReport
from ds_hybrid.rebalance.trace import PARTS_FOLDER
from ds_hybrid.topology.cluster import Cluster


class Observer(Watcher):
    """Watches the engine of this rank.

    Args:
        layers: of the model, in one order on every rank.
        module: the whole model, whose forwards tell training from evaluation.
        monitor: DeepSpeed's, which writes on rank 0.
        cluster: the hosts; the first rank of each reads its NVLinks.
        describe: gives the run's first record; its argument says why there is no NVLink use, if there is none.
        lr: gives the learning rates of the parameter groups.
        attention: over sequences that ranks share; None: there is none.

    Raises:
        ConfigError: on every rank, when rank 0 cannot write the directory, or another engine does.
    """

    def __init__(
        self,
        config: ObserveConfig,
        layers: Sequence[MoELayer],
        module: nn.Module,
        monitor: Any,
        cluster: Cluster,
        describe: Callable[[str | None], RunRecord],
        lr: Callable[[], Sequence[float]],
        attention: SharedAttention | None = None,
    ) -> None:
        self._interval = config.interval
        self._layers = {layer.layer_name: layer for layer in layers}
        self._lr = lr
        self._rank = dist.get_rank()
        self._stats = StatsReader(layers, training_alone=True)
        self._counts = RoutingCounts(layers) if config.routing_trace and layers else None
        self._draws_timeline = config.directory is not None and config.timeline
        self._spans = SpanRecorder(layers, module, attention)
        self._clock = TrainingClock()
        host = next(host for host in cluster.hosts if self._rank in host.ranks)
        self._host = host.name
        counters = _read_nvlink() if self._rank == host.ranks[0] else None
        no_nvlink = counters.reason if isinstance(counters, NotAvailable) else None
        self._nvlink = None if no_nvlink is not None else counters
        self._attention = None if attention is None else attention.meter
        self._attended = None if attention is None else attention.meter.training_total()
        self._loss = torch.zeros((), device=get_accelerator().current_device_name())
        self._num_losses, self._has_parts = 0, False
        self._records = Outlet[RecordWriter](str(config.directory), None)
        self._trace = Outlet[RoutingTraceWriter](str(config.directory), None)
        if config.directory is not None:
            raise_alike(self._open(config.directory, describe, no_nvlink) if self._rank == 0 else [])
        self._monitors = Outlet[Any]("monitors", monitor if self._rank == 0 and monitor.enabled else None)
        self._hooks = [
            module.register_forward_pre_hook(self._before_forward),
            module.register_forward_hook(self._after_forward),
        ]
        self._began_at = 0
        self._begin_window(step=0, is_paused=True)

    def _open(self, directory: str, describe: Callable[[str | None], RunRecord], no_nvlink: str | None) -> list[str]:
        """Open the files of rank 0 and write the first record; why it cannot."""
        records = None
        try:
            records = RecordWriter(directory)
            if self._counts is not None:
                facts = {"top_k": [layer.top_k for layer in self._layers.values()]}
                trace = RoutingTraceWriter(directory, list(self._layers), facts)
                self._trace = Outlet(f"{directory}/{PARTS_FOLDER}", trace)
            records.write(describe(no_nvlink))
            self._records = Outlet(directory, records, RecordWriter.close)
            return []
        except EventsError as error:
            problem = str(error)
        except OSError as error:
            problem = f'ds_hybrid.observe.directory = "{directory}": {error}. Name one that rank 0 can write.'
        except Exception as error:  # raised on this rank alone, it would leave the others waiting
            problem = (
                f'ds_hybrid.observe.directory = "{directory}": the run has no description: {type(error).__name__}: '
                f"{error}. Set it to null."
            )
        if records is not None:
            records.close()
        return [problem]

    def loss(self, loss: Tensor, *, is_part_of_step: bool = False) -> None:
        self._loss += loss.detach().sum(dtype=torch.float32)  # of one element, whatever its shape
        if is_part_of_step:
            self._has_parts = True
        else:
            self._num_losses += 1

    @contextmanager
    def work(self, name: str, phase: str) -> Iterator[None]:
        try:
            with self._spans.work(name, phase):
                yield
        finally:
            self._clock.worked()

    def pause(self) -> None:
        self._clock.pause()
        self._flush_trace()

    def after_step(self, progress: Progress, changes: Sequence[DispatcherChange], look: Look | None) -> None:
        self._tell_changes(progress, changes, look)
        self._note_placements(progress.step)
        self._num_steps += 1
        self._num_losses += self._has_parts  # the parts of a step are one loss, however many they were
        self._has_parts = False
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
            self._clock.worked()

    def _tell_changes(self, progress: Progress, changes: Sequence[DispatcherChange], look: Look | None) -> None:
        now, step, samples = time.time(), progress.step, progress.samples
        if changes:
            self._write(lambda: dispatcher_records(changes, time=now, step=step))
            self._monitors.tell(lambda monitor: monitor.write_events(change_events(changes, samples)))
        if look is not None:
            self._write(lambda: rebalance_records(look, self._placements(), time=now, step=step))
            self._monitors.tell(lambda monitor: monitor.write_events(look_events(look, samples)))

    def moved(
        self, progress: Progress, targets: Mapping[str, ExpertPlacement], report: MoveReport, seconds: float
    ) -> None:
        placements = self._placements()
        self._note_placements(progress.step)
        self._write(
            lambda: [
                RebalanceRecord(
                    time=time.time(),
                    step=progress.step,
                    action="called",
                    reason="engine.move_experts was called",
                    num_moved=report.num_moved,
                    seconds=seconds,
                    bytes_sent=report.bytes_sent,
                    placements={name: slots(placements[name]) for name in targets},
                )
            ]
        )
        self._monitors.tell(lambda monitor: monitor.write_events(moved_events(report.num_moved, progress.samples)))

    def resumed(self, step: int, path: str) -> None:
        placements = {name: slots(placement) for name, placement in self._placements().items()}
        self._write(lambda: [ResumeRecord(time=time.time(), step=step, path=path, placements=placements)])
        self._stats.skip()
        self._take_report()
        if self._counts is not None:
            self._counts.skip()
        self._trace.tell(lambda trace: trace.begin_part())
        self._began_at = step
        self._begin_window(step=step, is_paused=True)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._spans.close()
        for outlet in (self._records, self._trace, self._monitors):
            outlet.close()

    def _placements(self) -> dict[str, ExpertPlacement]:
        return {name: layer.placement for name, layer in self._layers.items()}

    def _note_placements(self, step: int) -> None:
        for since, layer in zip(self._placed, self._layers.values(), strict=True):
            if layer.placement is not since[-1][1]:
                since.append((step, layer.placement))

    def _before_forward(self, module: nn.Module, _args: Any) -> None:
        if module.training:
            self._clock.work()
            self._spans.begin_forward()
        else:
            self._clock.pause()

    def _after_forward(self, module: nn.Module, _args: Any, _output: Any) -> None:
        if module.training:
            self._spans.end_forward()
            self._clock.worked()

    def _begin_window(self, *, step: int, is_paused: bool = False) -> None:
        """Count from here: the next record is of what follows ``step``."""
        self._num_steps = 0
        self._placed = [[(step, layer.placement)] for layer in self._layers.values()]
        self._watch(step=step)
        self._clock.begin(is_paused=is_paused)

    def _watch(self, *, step: int) -> None:
        """Note the works of the step after ``step`` if its timeline is wanted."""
        number, rest = divmod(step + 1, self._interval)
        since_start = number - self._began_at // self._interval
        self._spans.watch(is_wanted=self._draws_timeline and rest == 0 and is_kept(since_start))

    def _record(self, progress: Progress) -> None:
        """Gather everything on rank 0, and write it. Collective."""
        seconds = self._clock.seconds()
        stats = self._stats.take()
        if not self._layers:
            dist.barrier()
        # All ranks leave that exchange at about the same time, whatever their clocks say.
        columns = self._spans.columns(since=instant())
        gathered: list[Any] | None = [None] * dist.get_world_size() if self._rank == 0 else None
        dist.gather_object((self._take_report(), columns), gathered)
        self._flush_trace()
        if gathered is None:
            return
        compose = functools.cache(
            lambda: step_record(
                stats,
                dict(zip(self._layers, (longest_placed(each, progress.step) for each in self._placed), strict=True)),
                {name: layer.top_k for name, layer in self._layers.items()},
                [report for report, _ in gathered],
                progress,
                time=time.time(),
                num_steps=self._num_steps,
                seconds=seconds,
                lr=self._lr(),
            )
        )
        self._write(lambda: [compose()])
        self._monitors.tell(lambda monitor: monitor.write_events(monitor_events(compose())))
        if columns is not None:
            of_rank = [theirs for _, theirs in gathered]
            names = self._spans.layer_names
            self._write(lambda: [timeline_record(of_rank, names, time=compose().time, step=progress.step)])

    def _take_report(self) -> RankReport:
        """What this rank knows alone, since the last time."""
        loss, num_losses = float(self._loss), self._num_losses
        self._loss.zero_()
        self._num_losses, self._has_parts = 0, False
        nvlink = None
        if self._nvlink is not None:
            now = read_counters()
            nvlink, self._nvlink = use_between(self._nvlink, now), now
        return RankReport(
            loss=loss,
            num_losses=num_losses,
            host_memory=psutil.Process().memory_info().rss,
            accelerator_memory=None if _is_cpu() else int(get_accelerator().max_memory_allocated()),
            host=self._host,
            nvlink=nvlink,
            attention=self._take_attention(),
        )

    def _take_attention(self) -> AttentionReport | None:
        if self._attention is None or self._attended is None:
            return None
        before, self._attended = self._attended, self._attention.training_total()
        sent = self._attended.since(before)
        return AttentionReport(sent.payload + sent.metadata, sent.exposed_seconds)

    def _flush_trace(self) -> None:
        """Sum the pending counts over the ranks, and write them. Collective."""
        if self._counts is None:
            return
        steps, counts = self._counts.take()
        self._trace.tell(lambda trace: trace.append(steps, counts))

    def _write(self, compose: Callable[[], Sequence[Record]]) -> None:
        def write(writer: RecordWriter) -> None:
            for record in compose():
                writer.write(record)

        self._records.tell(write)


def _read_nvlink() -> NvlinkCounters:
    return NotAvailable("the accelerator is the CPU") if _is_cpu() else read_counters()


def _is_cpu() -> bool:
    return bool(get_accelerator().device_name() == "cpu")

"""Notes what this rank does in the steps whose timelines are wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_hybrid.attention.hugging_face import SharedAttention, silent
from ds_hybrid.dispatch.spans import SILENT, LayerSpans, SpanLog, Spans
from ds_hybrid.dispatch.stopwatch import Instant, instant, seconds_between
from ds_hybrid.moe.kinds import MoELayer
from ds_hybrid.observe.timeline import SpanColumns, Timed, span_columns

WHOLE_MODEL = -1


class SpanRecorder:
    """Watches the works of one rank, from :meth:`watch` to the next one.

    Args:
        layers: the MoE layers, in one order on every rank.
        module: the whole model; tells the names of attention layers.
        attention: over sequences that ranks share; None: there is none.
    """

    def __init__(self, layers: Sequence[MoELayer], module: nn.Module, attention: SharedAttention | None) -> None:
        self._layers = layers
        self._name_of = {part: name for name, part in module.named_modules()}
        self._attention_layers: list[nn.Module] = []
        self._log: SpanLog | None = None
        self._forward_began: Instant = None
        self._attention = attention
        if attention is not None:
            attention.spans_of = self._spans_of_attention

    def watch(self, *, is_wanted: bool) -> None:
        """Begin anew, or note nothing."""
        self._log = SpanLog() if is_wanted else None
        for number, layer in enumerate(self._layers):
            layer.meter.watched_by = SILENT if self._log is None else LayerSpans(self._log, number)

    def close(self) -> None:
        """Note nothing any more, and let go of what was watched."""
        self.watch(is_wanted=False)
        if self._attention is not None:
            self._attention.spans_of = silent

    def _spans_of_attention(self, layer: nn.Module) -> Spans:
        """Attention layers are numbered after the MoE layers, as they first run: in one order on all ranks."""
        if self._log is None:
            return SILENT
        if layer not in self._attention_layers:
            self._attention_layers.append(layer)
        return LayerSpans(self._log, len(self._layers) + self._attention_layers.index(layer))

    @contextmanager
    def work(self, name: str, phase: str) -> Iterator[None]:
        """Notes a work of the whole model."""
        begin = None if self._log is None else instant()
        try:
            yield
        finally:
            self._add(name, phase, begin)

    def begin_forward(self) -> None:
        self._forward_began = None if self._log is None else instant()

    def end_forward(self) -> None:
        self._add("forward", "forward", self._forward_began)

    def _add(self, name: str, phase: str, begin: Instant) -> None:
        if self._log is not None and begin is not None:
            self._log.add(name, phase, WHOLE_MODEL, begin)

    @property
    def layer_names(self) -> list[str]:
        """What the numbers of layers stand for."""
        moe = [layer.layer_name for layer in self._layers]
        return [*moe, *(self._name_of.get(layer, "attention") for layer in self._attention_layers)]

    def columns(self, *, since: Instant) -> SpanColumns | None:
        """What was noted, by seconds from ``since``; None where no timeline is wanted. Waits for the device."""
        if self._log is None:
            return None
        get_accelerator().synchronize()
        return span_columns(
            [
                Timed(
                    note.name,
                    note.phase,
                    note.layer,
                    start=-seconds_between(note.begin, since),
                    seconds=seconds_between(note.begin, note.end),
                )
                for note in self._log.notes
            ]
        )

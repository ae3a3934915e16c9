"""NVLink use of a host's GPUs: from NVML's counters at both ends of a window, or from the text of a DCGM exporter.

Both count payload bytes, without protocol headers. The links' speed includes the headers, so a saturated GPU shows
somewhat less than 1. What a machine does not have is never an error here, but a :class:`NotAvailable` with its reason.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_KIB = 1024
_MIB = 1024 * 1024
_MEGABYTE = 1_000_000


@dataclass(frozen=True)
class NotAvailable:
    """There is nothing to tell about a GPU, or about the whole host."""

    reason: str


@dataclass(frozen=True)
class GpuCounters:
    """What NVML tells of one GPU at one instant.

    Attributes:
        uuid: tells whether two readings are of one GPU.
        at_us: when the counters were read, microseconds since 1970.
        sent: bytes sent over all links since the counter's start.
        received: the same for bytes received.
        link_speeds: bytes per second in one direction of each link: 0 for a link that is down, None when unknown.
    """

    uuid: str
    at_us: int
    sent: int
    received: int
    link_speeds: tuple[int | None, ...]

    @property
    def links_down(self) -> frozenset[int]:
        return frozenset(link for link, speed in enumerate(self.link_speeds) if speed == 0)

    @property
    def peak(self) -> float | None:
        """Bytes per second in one direction over all links that are up; None when the speed of one is unknown."""
        known = [speed for speed in self.link_speeds if speed is not None]
        return float(sum(known)) if len(known) == len(self.link_speeds) else None


@dataclass(frozen=True)
class GpuUse:
    """NVLink traffic of one GPU, as the mean over a window.

    Attributes:
        source: the counters or metrics that were read.
        seconds: the window; None where it is the exporter's own sampling interval.
        sent: bytes per second, over all links of the GPU together.
        received: bytes per second. Where the metric has no direction, it and ``sent`` are one half of it each.
        peak: bytes per second that the GPU's links carry in one direction, None when unknown.
    """

    source: str
    seconds: float | None
    sent: float
    received: float
    peak: float | None

    @property
    def fraction(self) -> float | None:
        """The part of ``peak`` that the busier direction used; None when the peak is unknown."""
        return max(self.sent, self.received) / self.peak if self.peak else None


NvlinkCounters = Mapping[int, GpuCounters | NotAvailable] | NotAvailable
"""Of each GPU by its index in nvidia-smi (which knows no CUDA_VISIBLE_DEVICES), or of none."""

NvlinkUse = Mapping[int, GpuUse | NotAvailable] | NotAvailable


def read_counters() -> NvlinkCounters:
    """Read the NVLink counters of all GPUs of this host through NVML. Call it at both ends of a window."""
    try:
        import pynvml
    except ImportError:
        return NotAvailable("nvidia-ml-py is not installed: pip install 'ds_hybrid[nvml]'")
    if not hasattr(pynvml, "NVML_FI_DEV_NVLINK_GET_SPEED"):
        return NotAvailable("the installed pynvml is too old: pip install --upgrade nvidia-ml-py")
    try:
        pynvml.nvmlInit()
        try:
            gpus = {gpu: _read_gpu(pynvml, gpu) for gpu in range(pynvml.nvmlDeviceGetCount())}
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return NotAvailable(f"NVML does not answer: {error}")
    return gpus or NotAvailable("NVML sees no GPU")


def use_between(before: NvlinkCounters, after: NvlinkCounters) -> NvlinkUse:
    """The use of each GPU from one reading to the next one, as the mean over that window."""
    if isinstance(before, NotAvailable):
        return before
    if isinstance(after, NotAvailable):
        return after
    absent = NotAvailable("NVML saw it at one end of the window only")
    return {gpu: _gpu_use(before.get(gpu, absent), after.get(gpu, absent)) for gpu in sorted({*before, *after})}


def _gpu_use(before: GpuCounters | NotAvailable, after: GpuCounters | NotAvailable) -> GpuUse | NotAvailable:
    if isinstance(before, NotAvailable):
        return before
    if isinstance(after, NotAvailable):
        return after
    if before.uuid != after.uuid:
        return NotAvailable(f"{before.uuid} at the window's start is {after.uuid} at its end")
    seconds = (after.at_us - before.at_us) / 1e6
    if seconds <= 0:
        return NotAvailable(f"the window is {seconds} s long: leave time between the two readings")
    # The counters sum over the links that are up, each with its own past.
    if moved := sorted(before.links_down ^ after.links_down):
        return NotAvailable(f"of its NVLinks {', '.join(map(str, moved))} went down or came up inside the window")
    # 64 bits of KiB last for centuries at any link's speed: a counter that falls did not wrap, it was reset.
    for way, start, end in (("sent", before.sent, after.sent), ("received", before.received, after.received)):
        if end < start:
            return NotAvailable(f"its count of bytes {way} was reset inside the window: it fell from {start} to {end}")
    return GpuUse(
        source="NVML",
        seconds=seconds,
        sent=(after.sent - before.sent) / seconds,
        received=(after.received - before.received) / seconds,
        peak=after.peak,
    )


def _read_gpu(pynvml: Any, gpu: int) -> GpuCounters | NotAvailable:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
        speeds = _link_speeds(pynvml, handle)
        if not speeds:
            return NotAvailable("it has no NVLink")
        if not any(speed != 0 for speed in speeds):
            return NotAvailable(f"all of its {len(speeds)} NVLinks are down")
        # Without a scope the counters are those of link 0.
        all_links = 0xFFFFFFFF
        sent, received = pynvml.nvmlDeviceGetFieldValues(
            handle,
            [
                (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, all_links),
                (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, all_links),
            ],
        )
        return GpuCounters(
            uuid=pynvml.nvmlDeviceGetUUID(handle),
            at_us=sent.timestamp or time.time_ns() // 1000,
            sent=_number(pynvml, sent) * _KIB,
            received=_number(pynvml, received) * _KIB,
            link_speeds=speeds,
        )
    except pynvml.NVMLError as error:
        return NotAvailable(f"NVML does not tell its NVLink counters: {error}")


def _link_speeds(pynvml: Any, handle: Any) -> tuple[int | None, ...]:
    """Of every link, as in ``GpuCounters``; none without NVLink.

    A Hopper GPU has no common speed, only one per link; an old driver has only the common one.
    """
    num_links, common = pynvml.nvmlDeviceGetFieldValues(
        handle, [pynvml.NVML_FI_DEV_NVLINK_LINK_COUNT, pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]
    )
    if num_links.nvmlReturn == pynvml.NVML_ERROR_NOT_SUPPORTED:
        return ()
    links = range(_number(pynvml, num_links))
    if not links:
        return ()
    per_link = pynvml.nvmlDeviceGetFieldValues(handle, [(pynvml.NVML_FI_DEV_NVLINK_GET_SPEED, link) for link in links])
    return tuple(
        _first_speed(pynvml, [speed, common]) if _is_up(pynvml, handle, link) else 0
        for link, speed in zip(links, per_link, strict=True)
    )


def _first_speed(pynvml: Any, values: Iterable[Any]) -> int | None:
    """Bytes per second from the first field value that has any. NVML's MBps are decimal."""
    known = (_number(pynvml, value) for value in values if value.nvmlReturn == pynvml.NVML_SUCCESS)
    return next((speed * _MEGABYTE for speed in known if speed), None)


def _is_up(pynvml: Any, handle: Any, link: int) -> bool:
    try:
        return bool(pynvml.nvmlDeviceGetNvLinkState(handle, link))
    except pynvml.NVMLError:
        return False


def _number(pynvml: Any, value: Any) -> int:
    """A field value. Raises NVMLError for one that NVML could not read."""
    if value.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(value.nvmlReturn)
    # The library leaves undefined what lies beyond the member it wrote; all of its wider integers are eight bytes.
    member = "uiVal" if value.valueType == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT else "ullVal"
    return int(getattr(value.value, member))


_SENT = "DCGM_FI_PROF_NVLINK_TX_BYTES"
_RECEIVED = "DCGM_FI_PROF_NVLINK_RX_BYTES"
_TOTAL = "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL"
_SAMPLE = re.compile(rf'({_SENT}|{_RECEIVED}|{_TOTAL})\{{((?:\s*\w+="(?:[^"\\]|\\.)*",?)*)\s*\}}\s+(\S+)')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def use_in_dcgm_text(text: str, *, peak: float | None = None) -> NvlinkUse:
    """The use of each GPU by DCGM's index, from the metrics of one host's DCGM exporter in Prometheus' text format.

    All three metrics are rates, whatever their ``# TYPE`` says: NVLINK_TX_BYTES and NVLINK_RX_BYTES in bytes per
    second (NVIDIA/dcgm-exporter issue 87), NVLINK_BANDWIDTH_TOTAL in MiB per second of both directions together
    (NVIDIA/dcgm-exporter pull request 658). The first two win, for they tell the directions apart.

    Args:
        text: the exporter's answer. It may be anything: what holds none of the metrics is "not available".
        peak: bytes per second that a GPU's links carry in one direction; the exporter does not tell.
    """
    rates: dict[int, dict[str, float]] = {}
    split: set[int] = set()
    hosts: set[str] = set()
    for line in text.splitlines():
        if not (sample := _SAMPLE.match(line.strip())):
            continue
        name, labels, value = sample[1], dict(_LABEL.findall(sample[2])), sample[3]
        # A sample that names a link is a part of its GPU's own sample.
        if not labels.get("gpu", "").isdecimal() or "nvlink" in labels:
            continue
        gpu = int(labels["gpu"])
        hosts.add(labels.get("Hostname") or labels.get("hostname", ""))
        # Pods that share a GPU have a sample each, of equal value: set, don't add.
        rates.setdefault(gpu, {})[name] = _rate(value)
        if labels.get("GPU_I_ID"):
            split.add(gpu)
    if not rates:
        return NotAvailable(
            f"the text has neither {_SENT} and {_RECEIVED} nor {_TOTAL}: add them to the exporter's list of metrics"
        )
    if len(hosts) > 1:
        return NotAvailable(f"the text covers {len(hosts)} hosts, {', '.join(sorted(hosts))}: give one exporter's text")
    return {
        gpu: NotAvailable("it is split into MIG instances, which have no NVLink")
        if gpu in split
        else _dcgm_use(rates[gpu], peak)
        for gpu in sorted(rates)
    }


def _dcgm_use(rates: Mapping[str, float], peak: float | None) -> GpuUse | NotAvailable:
    known = {name: rate for name, rate in rates.items() if math.isfinite(rate) and rate >= 0}
    if _SENT in known and _RECEIVED in known:
        return GpuUse(f"{_SENT}, {_RECEIVED}", None, known[_SENT], known[_RECEIVED], peak)
    if _TOTAL in known:
        one_way = known[_TOTAL] * _MIB / 2
        return GpuUse(_TOTAL, None, one_way, one_way, peak)
    return NotAvailable("the exporter has only " + ", ".join(f"{name} = {rate:g}" for name, rate in rates.items()))


def _rate(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return math.nan

"""NVLink use: NVML's counters through the real binding over a stand-in library, and a DCGM exporter's text."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import pytest

from ds_hybrid.observe.nvlink import (
    GpuCounters,
    GpuUse,
    NotAvailable,
    NvlinkCounters,
    NvlinkUse,
    read_counters,
    use_between,
    use_in_dcgm_text,
)

_DATA = Path(__file__).parent / "data"
_DCGM_TEXT = (_DATA / "dcgm_exporter.prom").read_text()
_START_US = 1_767_225_600_000_000


# The pure part.


def _counters(
    seconds: float = 0.0,
    *,
    uuid: str = "GPU-a",
    sent: int = 0,
    received: int = 0,
    speeds: tuple[int | None, ...] = (10, 10),
) -> GpuCounters:
    return GpuCounters(uuid, _START_US + round(seconds * 1e6), sent, received, speeds)


def test_rates_are_differences_over_the_window() -> None:
    before = {0: _counters(sent=5_000, received=700), 1: _counters(uuid="GPU-b")}
    after = {0: _counters(2.5, sent=5_030, received=710), 1: _counters(0.5, uuid="GPU-b", sent=8)}
    use = use_between(before, after)
    assert use == {0: GpuUse("NVML", 2.5, 12.0, 4.0, 20.0), 1: GpuUse("NVML", 0.5, 16.0, 0.0, 20.0)}
    assert [gpu.fraction for gpu in use.values()] == [0.6, 0.8]


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (
            _counters(sent=9),
            _counters(1, sent=8),
            "its count of bytes sent was reset inside the window: it fell from 9 to 8",
        ),
        (
            _counters(received=2**64 * 1024 - 1024),
            _counters(1, received=1024),
            "its count of bytes received was reset inside the window: it fell from 18889465931478580853760 to 1024",
        ),
        (_counters(), _counters(), "the window is 0.0 s long: leave time between the two readings"),
        (_counters(3), _counters(1), "the window is -2.0 s long: leave time between the two readings"),
        (_counters(), _counters(1, uuid="GPU-b"), "GPU-a at the window's start is GPU-b at its end"),
        (NotAvailable("it has no NVLink"), _counters(), "it has no NVLink"),
        (_counters(), NotAvailable("GPU is lost"), "GPU is lost"),
    ],
)
def test_one_gpu_without_a_rate(
    before: GpuCounters | NotAvailable, after: GpuCounters | NotAvailable, reason: str
) -> None:
    use = use_between({3: before, 4: _counters()}, {3: after, 4: _counters(1, sent=5)})
    assert use == {3: NotAvailable(reason), 4: GpuUse("NVML", 1.0, 5.0, 0.0, 20.0)}


def test_gpu_that_comes_or_goes() -> None:
    absent = NotAvailable("NVML saw it at one end of the window only")
    assert use_between({0: _counters()}, {1: _counters(1)}) == {0: absent, 1: absent}


def test_host_without_counters() -> None:
    nothing, gpus = NotAvailable("NVML sees no GPU"), {0: _counters()}
    assert use_between(nothing, gpus) == use_between(gpus, nothing) == nothing


@pytest.mark.parametrize(
    ("speeds", "peak", "fraction"),
    [((10, 10, 10), 30.0, 0.2), ((10, 0, 10), 20.0, 0.3), ((10, None), None, None), ((0, None, 10), None, None)],
)
def test_links_that_are_down_or_have_no_known_speed(
    speeds: tuple[int | None, ...], peak: float | None, fraction: float | None
) -> None:
    use = use_between({0: _counters(speeds=speeds)}, {0: _counters(1, sent=6, received=5, speeds=speeds)})
    assert use == {0: GpuUse("NVML", 1.0, 6.0, 5.0, peak)}
    assert use[0].fraction == fraction


def test_links_that_change_inside_the_window() -> None:
    changed = NotAvailable("of its NVLinks 0, 3 went down or came up inside the window")
    some, others = _counters(speeds=(0, 10, 10, 10)), _counters(1, sent=6, speeds=(10, 10, None, 0))
    assert use_between({0: some}, {0: others}) == {0: changed}


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, "nvidia-ml-py is not installed: pip install 'ds_hybrid[nvml]'"),
        (ModuleType("pynvml"), "the installed pynvml is too old: pip install --upgrade nvidia-ml-py"),
    ],
)
def test_no_usable_binding(module: ModuleType | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    assert read_counters() == NotAvailable(reason)


# The real binding over a stand-in for the driver's library.

_NOT_SUPPORTED, _LOST, _DRIVER_NOT_LOADED = 3, 15, 9
_UINT, _ULONGLONG = 1, 3
_SPEED_COMMON, _LINK_COUNT, _SENT, _RECEIVED, _SPEED = 90, 91, 138, 139, 164
_READ_TWICE = """
import os, sys
from ds_hybrid.observe.nvlink import read_counters, use_between
readings = []
for machine in sys.argv[1:]:
    os.environ["STAND_IN_NVML"] = machine
    readings.append(read_counters())
assert "torch" not in sys.modules and "deepspeed" not in sys.modules
print(repr(readings[0]) if len(readings) == 1 else repr(use_between(*readings)))
"""

Reader = Callable[..., NvlinkCounters | NvlinkUse]


def _field(
    gpu: int, field: int, scope: int, value: int, *, type: int = _UINT, at: int = _START_US, code: int = 0
) -> str:
    return f"field {gpu} {field} {scope} {code} {type} {at} {value}"


def _gpu(
    gpu: int,
    sent_kib: int,
    received_kib: int,
    *,
    at: int = _START_US,
    num_links: int = 18,
    speed: int = 26562,
    down: Iterable[int] = (),
) -> list[str]:
    """The lines of one H100, unless told otherwise."""
    return [
        f"gpu GPU-{gpu} 0",
        _field(gpu, _LINK_COUNT, 0, num_links),
        *(f"link {gpu} {link} 0 {int(link not in down)}" for link in range(num_links)),
        *(_field(gpu, _SPEED, link, speed) for link in range(num_links) if link not in down),
        _field(gpu, _SENT, -1, sent_kib, type=_ULONGLONG, at=at),
        _field(gpu, _RECEIVED, -1, received_kib, type=_ULONGLONG, at=at),
    ]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the compiled stand-in."""
    if importlib.util.find_spec("pynvml") is None:
        pytest.skip("nvidia-ml-py is not installed: pip install 'ds_hybrid[nvml]'")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (gcc or cc) on PATH")
    folder = tmp_path_factory.mktemp("nvml")
    source = _DATA / "stand_in_nvml.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder


def _run(library: Path, *machines: Path) -> NvlinkCounters | NvlinkUse:
    """What a fresh interpreter reads: once for one machine, the use between two."""
    command = [sys.executable, "-c", _READ_TWICE, *map(str, machines)]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return eval(done.stdout)


@pytest.fixture
def read(library: Path, tmp_path: Path) -> Reader:
    def reader(*machines: list[str]) -> NvlinkCounters | NvlinkUse:
        paths = [tmp_path / f"machine{number}.txt" for number in range(len(machines))]
        for path, lines in zip(paths, machines, strict=True):
            path.write_text("\n".join(lines) + "\n")
        return _run(library, *paths)

    return reader


def test_use_through_nvml(read: Reader) -> None:
    at = _START_US + 2_000_000
    before = _gpu(0, 10**13, 5) + _gpu(1, 0, 0, down=[2, 7])
    after = _gpu(0, 10**13 + 600_000_000, 100_000_005, at=at) + _gpu(1, 0, 0, at=at + 500_000, down=[2, 7])
    use = read(before, after)
    assert use == {
        0: GpuUse("NVML", 2.0, 300_000_000 * 1024, 50_000_000 * 1024, 18 * 26.562e9),
        1: GpuUse("NVML", 2.5, 0.0, 0.0, 16 * 26.562e9),
    }
    assert use[0].fraction == pytest.approx(0.6425, abs=5e-5)
    assert use[1].fraction == 0.0


def test_speed_of_a_link_else_the_common_one_else_unknown(read: Reader) -> None:
    own = [_field(0, _SPEED, 0, 26562), _field(0, _SPEED, 1, 0)]  # and none for link 2
    rest = [line for line in _gpu(0, 7, 9, num_links=3) if f"field 0 {_SPEED} " not in line]
    common = _field(0, _SPEED_COMMON, 0, 25781)

    def speeds(machine: list[str]) -> tuple[int | None, ...]:
        return read(machine)[0].link_speeds

    assert speeds([*rest, *own, common]) == (26_562_000_000, 25_781_000_000, 25_781_000_000)
    assert speeds([*rest, common]) == (25_781_000_000,) * 3
    assert speeds([*rest, *own]) == (26_562_000_000, None, None)


def test_gpus_that_cannot_be_read_leave_the_others_alone(read: Reader) -> None:
    refused = f"field 6 {_RECEIVED} -1"
    machine = [
        *(f"gpu GPU-0 {_LOST}", "gpu GPU-1 0"),
        *("gpu GPU-2 0", _field(2, _LINK_COUNT, 0, 0)),
        *_gpu(3, 0, 0, num_links=4, down=range(4)),
        *_gpu(4, 1, 2, num_links=1),
        *(line.replace("link 5 0 0 1", f"link 5 0 {_NOT_SUPPORTED} 1") for line in _gpu(5, 1, 2, num_links=2)),
        *(line for line in _gpu(6, 1, 2) if not line.startswith(refused)),
        *("gpu GPU-7 0", _field(7, _LINK_COUNT, 0, 0, code=_LOST)),
    ]
    silent = "NVML does not tell its NVLink counters: "
    assert read(machine) == {
        0: NotAvailable(silent + "GPU is lost"),
        1: NotAvailable("it has no NVLink"),
        2: NotAvailable("it has no NVLink"),
        3: NotAvailable("all of its 4 NVLinks are down"),
        4: GpuCounters("GPU-4", _START_US, 1024, 2048, (26_562_000_000,)),
        5: GpuCounters("GPU-5", _START_US, 1024, 2048, (0, 26_562_000_000)),
        6: NotAvailable(silent + "Not Supported"),
        7: NotAvailable(silent + "GPU is lost"),
    }


def test_counters_without_a_time_get_the_hosts(read: Reader) -> None:
    start = time.time_ns() // 1000
    counters = read(_gpu(0, 1, 2, at=0))[0]
    assert start <= counters.at_us <= time.time_ns() // 1000


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        ([], "NVML sees no GPU"),
        ([f"init {_DRIVER_NOT_LOADED}"], "NVML does not answer: Driver Not Loaded"),
    ],
)
def test_no_gpu(machine: list[str], reason: str, read: Reader) -> None:
    assert read(machine) == NotAvailable(reason)


def test_no_driver_library(library: Path, tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()  # in front of one that the machine may have
    expected = NotAvailable("NVML does not answer: NVML Shared Library Not Found")
    assert _run(tmp_path, tmp_path / "none") == expected


# The exporter's text.

_BY_DIRECTION = "DCGM_FI_PROF_NVLINK_TX_BYTES, DCGM_FI_PROF_NVLINK_RX_BYTES"


def test_use_in_a_dcgm_exporters_text() -> None:
    use = use_in_dcgm_text(_DCGM_TEXT, peak=450e9)
    half = 386_586 * 2**20 / 2
    assert use == {
        0: GpuUse(_BY_DIRECTION, None, 302e9, 120e9, 450e9),
        1: GpuUse(_BY_DIRECTION, None, 0.0, 25e9, 450e9),
        2: GpuUse("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", None, half, half, 450e9),
        3: NotAvailable("it is split into MIG instances, which have no NVLink"),
        4: NotAvailable("the exporter has only DCGM_FI_PROF_NVLINK_TX_BYTES = nan, DCGM_FI_PROF_NVLINK_RX_BYTES = 7"),
    }
    fractions = [use[gpu].fraction for gpu in range(3)]
    assert fractions == pytest.approx([302 / 450, 25 / 450, 0.4504], abs=5e-5)


@pytest.mark.parametrize("peak", [None, 0.0])
def test_exporter_without_a_peak(peak: float | None) -> None:
    assert use_in_dcgm_text(_DCGM_TEXT, peak=peak)[0].fraction is None


@pytest.mark.parametrize(
    "text", ["", "<html><body>404 page not found</body></html>", _DCGM_TEXT.replace("NVLINK", "PCIE")]
)
def test_text_without_the_metrics(text: str) -> None:
    assert use_in_dcgm_text(text) == NotAvailable(
        "the text has neither DCGM_FI_PROF_NVLINK_TX_BYTES and DCGM_FI_PROF_NVLINK_RX_BYTES nor "
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL: add them to the exporter's list of metrics"
    )


@pytest.mark.parametrize(("value", "shown"), [("abc", "nan"), ("-3", "-3"), ("+Inf", "inf")])
def test_value_that_is_no_rate(value: str, shown: str) -> None:
    use = use_in_dcgm_text(f'DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{{gpu="0"}} {value}')
    assert use == {0: NotAvailable(f"the exporter has only DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL = {shown}")}


def test_text_of_several_hosts() -> None:
    text = _DCGM_TEXT + _DCGM_TEXT.replace("node-7", "node-8")
    assert use_in_dcgm_text(text) == NotAvailable("the text covers 2 hosts, node-7, node-8: give one exporter's text")

"""What moving experts brings to a training run whose routing is skewed and whose text changes.

    launch/run_local.sh 4 launch/bench/rebalance.py --steps 300 --interval 25 --json rebalance.json
    torchrun --nproc_per_node 8 launch/bench/rebalance.py --algorithms swap article_round_robin --batch 2

Engines with the same weights train in the same processes on the same batches, step by step in turn: one whose experts
stay (`off`), and one for each algorithm. The balance loss ends after a warm-up; from then on the kind of text that
dominates changes every so often. Ratios are to `off` in the same step. With fewer cores than ranks, a rank that
computes less frees a core for the others: wall time then tells little of what a core for each rank would bring.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import sys
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import deepspeed.comm as dist
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from effect import BASELINE, Event, Track, events, to_json, to_markdown, window
from numpy.typing import NDArray
from ranks import gathered, run_on_ranks
from small_model import Sizes, add_sizes, build_engine
from torch.nn.functional import cross_entropy

from ds_hybrid.cli.arguments import count
from ds_hybrid.dispatch.modes import MODES
from ds_hybrid.errors import ConfigError
from ds_hybrid.observe.run_directory import read_events
from ds_hybrid.rebalance.algorithms import Algorithm

BALANCE = 0.01
MAX_BYTES = 4 * 2**20
"""Of a domain's text."""


@dataclass(frozen=True)
class Options(Sizes):
    """The command line."""

    steps: int
    warm_up: int
    shift: int
    dominance: float
    window: int | None
    interval: int
    algorithms: list[Algorithm]
    horizon: int
    half_life: float
    min_gain: float
    mode: str
    zero_stage: int
    lr: float
    seed: int
    json: Path | None
    markdown: Path | None

    @property
    def steps_of_window(self) -> int:
        return self.window or self.interval


@dataclass(frozen=True)
class Domain:
    """A kind of text: its bytes, [N] uint8."""

    name: str
    text: NDArray[np.uint8]


@dataclass(frozen=True)
class Sample:
    """One step of one engine on this rank; loads and experts' seconds [L][P] are of all ranks."""

    loads: list[list[int]]
    expert_seconds: list[list[float]]
    wall: float
    cpu: float
    loss: float
    num_moved: int
    log: tuple[str, ...]


def parse_options(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=count, default=300, help="of each engine (%(default)s)")
    add("--warm-up", type=int, default=75, help="steps with the balance loss (%(default)s)")
    add("--shift", type=count, default=75, help="steps until another domain dominates (%(default)s)")
    add("--dominance", type=float, default=0.75, help="its share, before all share the rest (%(default)s)")
    add("--window", type=count, help="steps of a row in the table (the interval)")
    add("--interval", type=count, default=25, help="steps between two decisions (%(default)s)")
    add("--algorithms", nargs="+", choices=get_args(Algorithm), default=["swap"], help="(%(default)s)")
    add("--horizon", type=count, default=200, help="steps in which a move must earn its cost (%(default)s)")
    add("--half-life", type=float, default=25, help="of the loads, in steps (%(default)s)")
    add("--min-gain", type=float, default=0.02, help="the least fall of the busiest rank's load (%(default)s)")
    add("--mode", choices=MODES, default="two_stage", help="alltoall gives the same losses to the bit (%(default)s)")
    add_sizes(parser, hidden=128)
    add("--zero-stage", type=int, choices=range(4), default=1, help="(%(default)s)")
    add("--lr", type=float, default=1e-3, help="after 20 steps (%(default)s)")
    add("--seed", type=int, default=0, help="of the weights and the batches (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write everything that was measured")
    add("--markdown", type=Path, metavar="FILE", help="write the tables there, not to the terminal")
    add("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    options = vars(parser.parse_args(arguments))
    # The deepspeed launcher passes it; the environment tells the same under every launcher.
    del options["local_rank"]
    return Options(**options)


def main() -> int:
    """Returns the exit code."""
    options = parse_options()
    return run_on_ranks("rebalance.py", lambda _device, environment: run(options, environment))


def run(options: Options, environment: dict[str, Any]) -> None:
    """Trains all engines side by side, and shows after each window what is known by then.

    Raises:
        ConfigError: on every rank, for sizes that do not fit, or hosts with different text.
    """
    domains = agreed_domains(options)
    with tempfile.TemporaryDirectory() as own_folder:
        folder = Path(gathered(own_folder)[0])  # of rank 0, which writes
        train(options, environment, domains, folder)
        dist.barrier()


def train(options: Options, environment: dict[str, Any], domains: list[Domain], folder: Path) -> None:
    """As :func:`run`; the engines write in ``folder`` what they decide."""
    engines = {name: make_engine(options, name, folder) for name in (BASELINE, *options.algorithms)}
    samples: dict[str, list[Sample]] = {name: [] for name in engines}
    for step in range(options.steps):
        tokens = batch(domains, options, step, rank=dist.get_rank())
        names = list(engines)
        turn = step % len(names)
        for name in (*names[turn:], *names[:turn]):
            samples[name].append(train_step(engines[name], tokens, with_balance_loss=step < options.warm_up))
        done = step + 1
        if done % options.steps_of_window == 0 or done == options.steps:
            gc.collect()
            tracks = {name: track_of(gathered(of_engine)) for name, of_engine in samples.items()}
            if dist.get_rank() == 0:
                found = [
                    event for name, track in tracks.items() for event in events(name, read_events(folder / name), track)
                ]
                show(tracks, found, domains, options, environment)


def make_engine(options: Options, name: str, folder: Path) -> Any:
    """An engine that moves experts as the algorithm ``name`` says, or not at all; the same weights each time."""
    document = ds_config(options, name, folder)
    return build_engine(options, document, seed=options.seed, output_router_logits=True, router_aux_loss_coef=BALANCE)


def ds_config(options: Options, name: str, folder: Path) -> dict[str, Any]:
    rebalance = {
        "enabled": name != BASELINE,
        "algorithm": options.algorithms[0] if name == BASELINE else name,
        "interval": options.interval,
        "load_half_life": options.half_life,
        "horizon": options.horizon,
        "min_gain": options.min_gain,
    }
    warm_up = {"warmup_min_lr": 0.0, "warmup_max_lr": options.lr, "warmup_num_steps": 20, "warmup_type": "linear"}
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": options.lr, "betas": [0.9, 0.95], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": warm_up},
        "zero_optimization": {"stage": options.zero_stage},
        "ds_hybrid": {
            "dispatch": {"mode": options.mode},
            "rebalance": rebalance,
            # Decisions alone: no step is recorded.
            "observe": {"directory": str(folder / name), "interval": 10**9, "timeline": False},
        },
    }


def train_step(engine: Any, tokens: NDArray[np.int64], *, with_balance_loss: bool) -> Sample:
    """One optimizer step on this rank's ``tokens`` [B, seq_len + 1], between two barriers of all ranks."""
    accelerator = get_accelerator()
    layers = engine.moe_layers_by_name()
    places = {name: layer.placement for name, layer in layers.items()}
    ids = torch.from_numpy(tokens).to(engine.device)
    said = io.StringIO()
    gc.disable()
    accelerator.synchronize()
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    outputs = engine(input_ids=ids[:, :-1], use_cache=False)
    loss = cross_entropy(outputs.logits.float().flatten(0, 1), ids[:, 1:].flatten())
    engine.backward(loss + BALANCE * outputs.aux_loss if with_balance_loss else loss)
    with contextlib.redirect_stdout(said):
        engine.step()
    accelerator.synchronize()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    gc.enable()
    stats = engine.moe_stats().layers
    return Sample(
        loads=[np.array(one.expert_load)[places[one.name].expert_of_slot].sum(1).tolist() for one in stats],
        expert_seconds=[list(one.expert_seconds) for one in stats],
        wall=wall,
        cpu=cpu,
        loss=float(loss.detach()),
        num_moved=sum(
            int((layer.placement.rank_of_expert != places[name].rank_of_expert).sum()) for name, layer in layers.items()
        ),
        log=tuple(said.getvalue().splitlines()),
    )


def track_of(ranks: list[list[Sample]]) -> Track:
    """All ranks' samples of one engine; the log is rank 0's."""
    first = ranks[0]
    return Track(
        loads=np.array([one.loads for one in first], dtype=np.float64),
        expert_seconds=np.array([one.expert_seconds for one in first]),
        wall=np.array([[one.wall for one in of_rank] for of_rank in ranks]).T,
        cpu=np.array([[one.cpu for one in of_rank] for of_rank in ranks]).T,
        losses=np.mean([[one.loss for one in of_rank] for of_rank in ranks], axis=0),
        num_moved=np.array([one.num_moved for one in first]),
        log=tuple(one.log for one in first),
    )


def show(
    tracks: Mapping[str, Track],
    found: list[Event],
    domains: list[Domain],
    options: Options,
    environment: dict[str, Any],
) -> None:
    """Of all steps so far, so that a run that is ended early has told what it knows."""
    num_steps, length = len(tracks[BASELINE].losses), options.steps_of_window
    windows = [
        window(tracks, first, min(first + length - 1, num_steps), dominating(domains, options, first, length))
        for first in range(1, num_steps + 1, length)
    ]
    from_here = options.warm_up + options.interval + 1
    whole = window(tracks, from_here, num_steps, ["all"]) if from_here <= num_steps else None
    if options.json is not None:
        described: dict[str, Any] = {"settings": environment, "options": asdict(options)}
        del described["options"]["json"], described["options"]["markdown"]
        described["log"] = {name: [line for step in track.log for line in step] for name, track in tracks.items()}
        described["losses"] = {name: track.losses.tolist() for name, track in tracks.items()}
        options.json.write_text(json.dumps(described | to_json(windows, whole, found), indent=1) + "\n")
    text = ", ".join(f"{name} {value}" for name, value in environment.items()) + "\n\n"
    text += to_markdown(windows, whole, found)
    if options.markdown is not None:
        options.markdown.write_text(text)
    elif num_steps == options.steps:
        print(text, flush=True)


def batch(domains: list[Domain], options: Options, step: int, *, rank: int) -> NDArray[np.int64]:
    """[B, seq_len + 1] bytes: each sequence from a domain drawn anew, from any place in it."""
    draw = np.random.default_rng([options.seed, step, rank])
    main = step // options.shift % len(domains)
    rows = []
    for _ in range(options.batch):
        chosen = main if draw.random() < options.dominance else int(draw.integers(len(domains)))
        text = domains[chosen].text
        start = int(draw.integers(len(text) - options.seq_len))
        rows.append(text[start : start + options.seq_len + 1])
    return np.stack(rows).astype(np.int64)


def dominating(domains: list[Domain], options: Options, first: int, length: int) -> list[str]:
    """The names of the domains that dominate in ``length`` steps from ``first``, counted from 1."""
    turns = range((first - 1) // options.shift, (first + length - 2) // options.shift + 1)
    return list(dict.fromkeys(domains[turn % len(domains)].name for turn in turns))


def agreed_domains(options: Options) -> list[Domain]:
    """What every Python environment with torch has. Raises ``ConfigError`` where hosts have different text."""
    # Not recursive: what was installed may lie inside the standard library's folder.
    library, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    domains = [
        read_domain("Python", library, "*.py"),
        read_domain("C++", Path(torch.__file__).parent / "include", "**/*.h"),
        read_domain("prose", packages, "*.dist-info/**/METADATA", "*.dist-info/**/LICENSE*"),
        read_domain("JSON", packages, "**/*.json"),
    ]
    domains = [domain for domain in domains if len(domain.text) > options.seq_len]
    digests = gathered([zlib.crc32(domain.text.tobytes()) for domain in domains])
    if any(digest != digests[0] for digest in digests):
        raise ConfigError("text: not the same on every host. Install the same Python packages on all of them.")
    return domains


def read_domain(name: str, folder: Path, *patterns: str) -> Domain:
    """The files of a folder in sorted order, up to ``MAX_BYTES``."""
    text = bytearray()
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}):
        if len(text) >= MAX_BYTES:
            break
        text += path.read_bytes()
    return Domain(name, np.frombuffer(bytes(text[:MAX_BYTES]), dtype=np.uint8))


if __name__ == "__main__":
    sys.exit(main())

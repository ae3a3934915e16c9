"""Trains a mixture-of-experts language model from scratch on the bytes of real text.

Starts under deepspeed, torchrun and mpirun alike:

    deepspeed --num_gpus 2 launch/train.py --deepspeed_config ds_configs/two_stage_zero1.json
    torchrun --nproc_per_node 2 launch/train.py --deepspeed_config ds_configs/two_stage_zero1.json --text my_folder
    mpirun -np 2 python launch/train.py --deepspeed_config ds_configs/two_stage_zero1.json --resume my_checkpoints
"""

import argparse
import json
import math
import os
import sys
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import deepspeed
import deepspeed.comm as dist
import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.utils import set_log_level_from_string
from models import TINY_MODELS, build_model, model_config
from numpy.typing import NDArray
from savings import Savings, asked_by_plan
from text import Corpus, Shard, Windows, held_out_batches, read_corpus, train_batch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import PretrainedConfig

import ds_hybrid
from ds_hybrid.config import read_document
from ds_hybrid.engine.sequence_batches import IGNORED
from ds_hybrid.errors import CheckpointError, ConfigError, HybridError
from ds_hybrid.observe.stats import MoEStats


@dataclass(frozen=True)
class Options:
    """The command line. ``steps`` counts from the first step of all: a resumed run does what is left of them."""

    deepspeed_config: str
    model: str
    text: Path | None
    seq_len: int
    steps: int
    eval_interval: int
    eval_batches: int
    seed: int
    activation_checkpoints: bool | None
    loss_chunk: int | None
    save: Path | None
    resume: Path | None
    log_file: Path | None
    run_dir: Path | None


@dataclass(frozen=True)
class Data:
    """What this rank reads: its shard of the training windows, and its held-out batches [B, seq_len + 1]."""

    train: Windows
    held_out: list[NDArray[np.int64]]
    shard: Shard
    seed: int


@dataclass(frozen=True)
class Step:
    """A finished step. ``loss`` is in nats per byte, the mean over all ranks; ``num_tokens`` is of all ranks."""

    step: int
    loss: float
    num_tokens: int
    seconds: float
    lr: float

    def record(self) -> dict[str, float]:
        """Its line in ``--log-file``."""
        return {
            "step": self.step,
            "loss": self.loss,
            "tokens_per_second": self.num_tokens / self.seconds,
            "lr": self.lr,
        }


@dataclass(frozen=True)
class Evaluation:
    """``loss`` on the held-out text in nats per byte; ``stats`` of the training before it."""

    loss: float
    stats: MoEStats


def parse_options(arguments: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", required=True, metavar="FILE", help="ds_config with a ds_hybrid section")
    parser.add_argument(
        "--model", default="tiny_qwen3_moe", help=f"{', '.join(TINY_MODELS)}, or the path of a Hugging Face config.json"
    )
    parser.add_argument("--text", type=Path, help="file or folder to train on (Python's own sources)")
    parser.add_argument("--seq-len", type=_positive, default=256, help="bytes in a sequence (%(default)s)")
    parser.add_argument("--steps", type=_positive, default=200, help="optimizer steps in all (%(default)s)")
    parser.add_argument("--eval-interval", type=_positive, default=100, help="steps between evaluations (%(default)s)")
    parser.add_argument("--eval-batches", type=_positive, default=8, help="held-out batches of a rank (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the order of the text (%(default)s)")
    parser.add_argument(
        "--activation-checkpoints",
        action=argparse.BooleanOptionalAction,
        help="compute layers again in backward instead of keeping what is inside them (as the ds_config's plan asks)",
    )
    parser.add_argument(
        "--loss-chunk",
        type=_natural,
        metavar="N",
        help="logits of N tokens at a time, computed again in backward; 0: all at once (as the ds_config's plan asks)",
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="write a checkpoint there at the end")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on from the latest checkpoint there")
    parser.add_argument("--log-file", type=Path, metavar="FILE", help="append one JSON line a step")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="write events there, not where the ds_config says")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    options = vars(parser.parse_args(arguments))
    # The deepspeed launcher passes it; the environment tells the same under every launcher.
    del options["local_rank"]
    return Options(**options)


def main() -> int:
    """Returns the exit code: 2, after one message, for what a user can put right."""
    options = parse_options()
    silence_libraries()
    # Under mpirun DeepSpeed would ignore MASTER_PORT, and two runs on one machine would meet.
    port = int(os.environ.get("MASTER_PORT", TORCH_DISTRIBUTED_DEFAULT_PORT))
    deepspeed.init_distributed(get_accelerator().communication_backend_name(), distributed_port=port)
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    try:
        run(options)
    except HybridError as error:
        if dist.get_rank() == 0:
            print(f"launch/train.py: {error}", file=sys.stderr, flush=True)
        code = 2
    else:
        code = 0
    dist.destroy_process_group()
    return code


def silence_libraries() -> None:
    """What DeepSpeed and torch tell each other's developers, on every rank, would bury the few lines that matter."""
    set_log_level_from_string("error")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    # transformers 5.24 has a new name beside it, which 5.8 does not have.
    warnings.filterwarnings("ignore", category=FutureWarning, message="`gradient_checkpointing_enable`")


def run(options: Options) -> None:
    """Trains, evaluates, reports and saves. Raises ``HybridError`` for what a user can put right."""
    corpus, model_shape, savings = read_inputs(options)
    model = build_model(model_shape, options.seed)
    savings.apply(model)
    config = ds_config(options)
    engine, *_ = ds_hybrid.initialize(model=model, model_parameters=model.parameters(), config=config)
    first_step = 0 if options.resume is None else load_checkpoint(engine, options)
    data = share_out(engine, corpus, options)

    is_rank_0 = dist.get_rank() == 0
    if is_rank_0 and savings.words:
        print(f"saving memory        {', '.join(savings.words)}", flush=True)
    first_loss = evaluate(engine, data).loss
    num_tokens, seconds = 0, 0.0
    with (
        open_log(options.log_file if is_rank_0 else None) as log,
        progress_bar(first_step, options.steps, is_shown=is_rank_0) as bar,
    ):
        for step in range(first_step, options.steps):
            done = train_step(engine, data, step)
            num_tokens += done.num_tokens
            seconds += done.seconds
            log.write(json.dumps(done.record()) + "\n")
            bar.set_postfix_str(f"loss {done.loss:.3f}, {num_tokens / seconds:,.0f} tokens/s", refresh=False)
            bar.update()
            if done.step % options.eval_interval == 0 or done.step == options.steps:
                evaluation = evaluate(engine, data)
                if is_rank_0:
                    bar.write(f"step {done.step}: held-out loss {evaluation.loss:.4f}", file=sys.stdout)
    if is_rank_0:
        print(summary(first_loss, evaluation, num_tokens / seconds))
    if options.save is not None:
        engine.save_checkpoint(str(options.save))


def ds_config(options: Options) -> str | dict[str, Any]:
    """The file, or what is in it with another directory for events."""
    if options.run_dir is None:
        return options.deepspeed_config
    document = read_document(options.deepspeed_config)
    section = document.get("ds_hybrid", {})
    observe = section.get("observe", {}) | {"directory": str(options.run_dir)}
    return document | {"ds_hybrid": section | {"observe": observe}}


def read_inputs(options: Options) -> tuple[Corpus, PretrainedConfig, Savings]:
    """The text, the model's config and how memory is saved.

    Raises ``ConfigError`` on every rank when any rank, on any host, cannot read them.

    Hosts must read the same text: their shards are disjoint only then.
    """
    problem, digest = None, 0
    try:
        asked = asked_by_plan(read_document(options.deepspeed_config), options.deepspeed_config)
        savings = asked.with_changes(checkpoints=options.activation_checkpoints, loss_chunk=options.loss_chunk)
        config = model_config(options.model, options.seq_len)
        corpus = read_corpus(options.text)
        digest = zlib.crc32(corpus.train.tobytes())
    except ConfigError as error:
        problem = str(error)
    reports: list[tuple[str | None, int]] = [(None, 0)] * dist.get_world_size()
    dist.all_gather_object(reports, (problem, digest))
    for problem, _ in reports:
        if problem is not None:
            raise ConfigError(problem)
    if len(set(reports)) > 1:
        raise ConfigError(f"--text {options.text}: not the same text on every host. Copy one folder to all of them.")
    return corpus, config, savings


def load_checkpoint(engine: Any, options: Options) -> int:
    """Returns the number of steps done so far."""
    path, _ = engine.load_checkpoint(str(options.resume))
    if path is None:
        raise CheckpointError(f"--resume {options.resume}: no checkpoint there. Give the DIR of an earlier --save.")
    if engine.global_steps >= options.steps:
        raise CheckpointError(
            f"--steps {options.steps}: {options.resume} is at step {engine.global_steps} already. Give more steps."
        )
    return int(engine.global_steps)


def share_out(engine: Any, corpus: Corpus, options: Options) -> Data:
    """This rank's part of the text: ranks that hold parts of one model replica, or of one sequence, read the same."""
    sequences = engine.sequence_parallel
    shard = Shard(
        rank=dist.get_rank(group=engine.data_parallel_group) if sequences is None else sequences.sequence,
        world=engine.dp_world_size,
        batch_size=engine.train_micro_batch_size_per_gpu(),
    )
    held_out = held_out_batches(Windows(corpus.held_out, options.seq_len), options.eval_batches, shard)
    return Data(Windows(corpus.train, options.seq_len), held_out, shard, options.seed)


def train_step(engine: Any, data: Data, step: int) -> Step:
    """One optimizer step, on one global batch. ``step`` counts from 0."""
    start = time.perf_counter()
    num_micro_batches = engine.gradient_accumulation_steps()
    lr = engine.get_lr()[0]
    mean_loss = torch.zeros((), device=engine.device)
    steps = range(step * num_micro_batches, (step + 1) * num_micro_batches)
    windows = (train_batch(data.train, micro_step, data.shard, seed=data.seed) for micro_step in steps)
    for batch in batches(engine, windows, per_step=num_micro_batches):
        losses, balance_loss = forward(engine, batch)
        loss = losses.sum() / batch["num_items_in_batch"]
        engine.backward(loss + balance_loss)
        engine.step()
        mean_loss += loss.detach() / num_micro_batches
    dist.all_reduce(mean_loss)
    return Step(
        step=step + 1,
        loss=mean_loss.item() / dist.get_world_size(),
        num_tokens=num_micro_batches * data.shard.world * data.shard.batch_size * data.train.seq_len,
        seconds=time.perf_counter() - start,
        lr=lr,
    )


def evaluate(engine: Any, data: Data) -> Evaluation:
    """The held-out loss, and what the MoE layers did in the training steps since the last evaluation."""
    stats = engine.moe_stats()
    engine.eval()
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    with torch.no_grad():
        for batch in batches(engine, data.held_out, per_step=1):
            losses, _ = forward(engine, batch)
            num_tokens = (batch["shift_labels"] != IGNORED).sum()
            total += torch.stack([losses.sum(dtype=torch.float64), num_tokens.double()])
    engine.train()
    dist.all_reduce(total)
    engine.moe_stats()
    return Evaluation(loss=(total[0] / total[1]).item(), stats=stats)


def batches(engine: Any, windows: Iterable[NDArray[np.int64]], *, per_step: int) -> Iterator[dict[str, Tensor]]:
    """Windows [B, seq_len + 1] as inputs of the model, on the device, with their targets ``shift_labels``; where ranks
    share sequences, this rank's part. The losses of an optimizer step of ``per_step`` batches, divided by
    ``num_items_in_batch``, have the mean over all tokens of the step as their mean over batches and ranks.
    """
    all_tokens = (torch.from_numpy(window).to(engine.device) for window in windows)
    whole = ({"input_ids": tokens[:, :-1], "shift_labels": tokens[:, 1:]} for tokens in all_tokens)
    if engine.sequence_parallel is not None:
        yield from engine.sequence_parallel.batches(whole, per_step=per_step)
        return
    for batch in whole:
        yield {**batch, "num_items_in_batch": torch.tensor(batch["shift_labels"].numel(), device=engine.device)}


def forward(engine: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | float]:
    """Cross entropy of each next byte in nats, float32 [B * tokens], 0 at padding, and what to add to its mean so that
    the router keeps the experts evenly busy (0 for a model that has no such loss, or has it off).
    """
    inputs = {key: batch[key] for key in ("input_ids", "position_ids", "attention_mask") if key in batch}
    with engine.module.get_output_embeddings().knowing(batch["shift_labels"]):
        outputs = engine(**inputs, use_cache=False)
    losses = outputs.logits.flatten()
    if engine.sequence_parallel is not None:
        return losses, engine.sequence_parallel.balance_loss(outputs, batch)
    balance_loss = getattr(outputs, "aux_loss", None)
    if balance_loss is None:
        return losses, 0.0
    return losses, engine.module.config.get_text_config().router_aux_loss_coef * balance_loss


def open_log(path: Path | None) -> TextIO:
    """For appending whole lines as they come; ``None`` swallows them."""
    if path is None:
        return open(os.devnull, "a")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("a", buffering=1)


def progress_bar(first_step: int, num_steps: int, *, is_shown: bool) -> Any:
    """A tqdm bar over the optimizer steps, on standard error."""
    # In a file each refresh is text to read past.
    seconds_between = 0.5 if sys.stderr.isatty() else 10
    return tqdm(initial=first_step, total=num_steps, unit="step", disable=not is_shown, mininterval=seconds_between)


def summary(first_loss: float, last: Evaluation, tokens_per_second: float) -> str:
    """Four lines: held-out loss, speed, wire bytes and expert load."""
    bits = [loss / math.log(2) for loss in (first_loss, last.loss)]
    return "\n".join(
        [
            f"held-out loss         {first_loss:.4f} -> {last.loss:.4f} ({bits[0]:.3f} -> {bits[1]:.3f} bits per byte)",
            f"tokens per second     {tokens_per_second:,.0f}",
            f"wire bytes per token  {last.stats.wire_bytes_per_token:,.0f} "
            f"({last.stats.lower_bound_ratio:.3f} x the lower bound)",
            f"expert load           {last.stats.load_max_over_mean:.2f} max/mean",
        ]
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())

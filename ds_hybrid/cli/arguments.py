"""Kinds of arguments that several sub-commands take."""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_hybrid.errors import ConfigError
from ds_hybrid.plan.candidate import Workload
from ds_hybrid.plan.model import ModelShape


def count(text: str) -> int:
    """An integer of at least 1; argparse tells what else it is."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be an integer >= 1")
    return int(text)


def output_file(text: str) -> Path:
    """A file in a folder that is there: what is wrong with it is told before the work."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder. Name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {str(path.parent)!r}. Make it first")
    return path


def add_workload_kinds(parser: argparse.ArgumentParser) -> None:
    """The options of :func:`workload` beside the sizes."""
    parser.add_argument(
        "--attention", choices=("fused", "eager"), default="fused", help="kernel of the attention (%(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=("bf16", "float32"), default="bf16", help="of weights and values (%(default)s)"
    )


def workload(arguments: argparse.Namespace, model: ModelShape) -> Workload:
    """What --seq-len, --micro-batch, --attention and --dtype say.

    Raises:
        ConfigError: the model takes no sequences of that length.
    """
    if model.max_positions is not None and arguments.seq_len > model.max_positions:
        raise ConfigError(
            f"--seq-len {arguments.seq_len}: {model.name} has max_position_embeddings {model.max_positions}. Give a "
            "smaller one, or a config.json with more."
        )
    value_bytes = 2 if arguments.dtype == "bf16" else 4
    return Workload(arguments.seq_len, arguments.micro_batch, value_bytes, arguments.attention)

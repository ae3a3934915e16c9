"""``ds_hybrid calibrate``: measure this host for the planner."""

import argparse
import os
import sys

import yaml

from ds_hybrid.calibrate.calibration import calibrate
from ds_hybrid.cli.arguments import count, output_file
from ds_hybrid.errors import ConfigError

_EXAMPLES = """examples:
  ds_hybrid calibrate --num-ranks 4 --write ds_configs/machines/mine.yaml
  ds_hybrid calibrate --num-ranks 2 --dtype float32
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the sub-command."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this host for ds_hybrid plan",
        description="Let ranks on this host measure matrix products, memory and links, all at once as in a run, and "
        "write a table that `ds_hybrid plan --cluster` takes. Takes about a minute.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--num-ranks", type=count, required=True, metavar="N", help="ranks of a run on this host")
    parser.add_argument("--dtype", choices=("bf16", "float32"), default="bf16", help="of the matrices (%(default)s)")
    parser.add_argument(
        "--write", type=output_file, metavar="FILE", help="write the table there instead of printing it"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The table as YAML."""
    if arguments.num_ranks < 2:
        raise ConfigError("--num-ranks 1: one rank has no links to measure. Give at least 2.")
    table = calibrate(arguments.num_ranks, arguments.dtype, os.environ)
    text = yaml.safe_dump(table, sort_keys=False, width=120)
    if arguments.write is None:
        print(text, end="")
    else:
        arguments.write.write_text(text, encoding="utf-8")
        print(f"wrote {arguments.write}", file=sys.stderr)
    return 0

"""``ds_hybrid validate``: check ds_configs before a machine is busy."""

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from ds_hybrid.cli.arguments import count
from ds_hybrid.config import HybridConfig, check, find_warnings, gathers_kv
from ds_hybrid.document import count_at, experts_are_parallel, read_document
from ds_hybrid.errors import ConfigError
from ds_hybrid.problems import ABSENT, value_at

_EXAMPLES = """examples:
  ds_hybrid validate ds_configs/two_stage_zero1.json
  ds_hybrid validate ds_configs/two_stage_*.json --world-size 8 --num-experts 64
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the sub-command."""
    parser = commands.add_parser(
        "validate",
        help="check ds_config files",
        description="Check ds_config files, DeepSpeed's keys and ours. All problems of a file come at once.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a ds_config, JSON or Hjson")
    parser.add_argument("--world-size", type=count, metavar="N", help="ranks of the run: checks the sizes against it")
    parser.add_argument("--num-experts", type=count, metavar="E", help="experts of each MoE layer")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """One line for each good file on stdout, one for each problem and warning on stderr."""
    status = 0
    for file in arguments.files:
        try:
            document = read_document(file)
            config = check(document, name=file, world_size=arguments.world_size, num_experts=arguments.num_experts)
        except ConfigError as error:
            print(error, file=sys.stderr)
            status = 2
        else:
            for warning in find_warnings(document, name=file):
                print(f"warning: {warning}", file=sys.stderr)
            print(f"{file}: ok ({summary(config, document)})")
    return status


def summary(config: HybridConfig, document: Mapping[str, Any]) -> str:
    """What a run with this file does, in one line."""
    experts = "expert_parallel off"
    if experts_are_parallel(document):
        experts = f"EP size {count_at(document, 'expert_parallel.autoep_size') or 1}"
    if gathers_kv(document):
        experts += f", SP size {count_at(document, 'sequence_parallel_size')} (kv_gather {config.attention.kv_gather})"
    stage = value_at(document, "zero_optimization.stage")
    return f"dispatch {config.dispatch.mode}, {experts}, ZeRO stage {0 if stage is ABSENT else stage}"

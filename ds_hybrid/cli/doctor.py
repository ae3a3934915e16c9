"""``ds_hybrid doctor``: is this machine, and every host of a hostfile, ready to train?"""

import argparse
import json
import sys
from pathlib import Path

from ds_hybrid.cli.arguments import count
from ds_hybrid.doctor.examination import DEFAULT_HOSTFILE, examine
from ds_hybrid.doctor.report import to_json
from ds_hybrid.doctor.text import to_text

_EXAMPLES = """examples:
  ds_hybrid doctor
  ds_hybrid doctor --hostfile hosts --config ds_configs/two_stage_zero1.json
  ds_hybrid doctor --num_gpus 4 --config ds_configs/two_stage_zero1.json --json
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the sub-command."""
    parser = commands.add_parser(
        "doctor",
        help="examine this machine, or the hosts of a hostfile, before a run",
        description="Examine this machine, or all hosts of a hostfile: versions, devices, links, names, locks, and two "
        "ranks that exchange numbers. Exits 0, 1 with warnings alone, 2 with errors.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--hostfile",
        type=Path,
        metavar="FILE",
        help=f"as for deepspeed: one NAME slots=NUMBER a line. Default: {DEFAULT_HOSTFILE} if there is one",
    )
    # Spelled as deepspeed spells it.
    parser.add_argument("--num_gpus", type=count, metavar="N", help="ranks of each host, as for deepspeed")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a ds_config: checks it and shows its groups")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The report on stdout; on stderr, what is being done that takes its time."""
    report = examine(
        hostfile=arguments.hostfile,
        num_gpus=arguments.num_gpus,
        config=arguments.config,
        tell=lambda text: print(f"ds_hybrid doctor: {text}", file=sys.stderr),
    )
    print(json.dumps(to_json(report), indent=2) if arguments.json else to_text(report))
    return report.exit_status

"""``ds_hybrid universal``: a checkpoint that other numbers of ranks can load."""

import argparse
from pathlib import Path

_EXAMPLES = """examples:
  ds_hybrid universal runs/checkpoints
  ds_hybrid universal runs/checkpoints --tag global_step400

The run that loads it has {"checkpoint": {"load_universal": true}} in its ds_config.
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the sub-command."""
    parser = commands.add_parser(
        "universal",
        help="make a checkpoint of ZeRO 1, 2 or 3 loadable at other sizes",
        description="Write DeepSpeed's universal form of a checkpoint beside it: masters and optimizer states whole, "
        "experts in logical order wherever they had moved. It loads at any expert-parallel and data-parallel size.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="CHECKPOINTS", help="the folder given to save_checkpoint")
    parser.add_argument("--tag", help="of the checkpoint. Default: the one that the file latest names")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The new folder on stdout."""
    from ds_hybrid.engine.universal import convert

    print(convert(arguments.folder, arguments.tag))
    return 0

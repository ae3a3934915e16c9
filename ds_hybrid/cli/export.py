"""``ds_hybrid export``: a checkpoint becomes safetensors that Hugging Face's transformers loads."""

import argparse
import re
from pathlib import Path

_EXAMPLES = """examples:
  ds_hybrid export runs/checkpoints out --config Qwen/Qwen3-30B-A3B
  ds_hybrid export runs/checkpoints out --tag global_step1000 --config config.json --tokenizer tokenizer --dtype bf16
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the sub-command."""
    parser = commands.add_parser(
        "export",
        help="write a checkpoint as safetensors",
        description="Write the model of a checkpoint as safetensors, all experts in the model's own order, whatever "
        "the ZeRO stage, the number of ranks and the places of the experts. Values come from the fp32 masters. It "
        "reads pickled files, as DeepSpeed does: export only checkpoints that you trust.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="the folder that save_checkpoint was given")
    parser.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    parser.add_argument("--tag", help="default: the latest")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="PATH",
        help="the model's config.json or the folder it is in; default: that in CHECKPOINT",
    )
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="a folder whose tokenizer goes along")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="default: fp32")
    parser.add_argument(
        "--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="of one file, in KB, MB or GB; default: 5GB"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """One line when it is done."""
    from ds_hybrid.hf.export import DTYPES, export

    export(
        arguments.checkpoint,
        arguments.out,
        tag=arguments.tag,
        config=arguments.config,
        tokenizer=arguments.tokenizer,
        dtype=DTYPES[arguments.dtype],
        max_shard_size=arguments.max_shard_size,
    )
    print(f"{arguments.out}: written ({arguments.dtype})")
    return 0


def _size(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB)", text):
        raise argparse.ArgumentTypeError(f"{text!r} must be a size such as 500MB or 5GB")
    return text

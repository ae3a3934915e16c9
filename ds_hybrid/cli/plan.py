"""``ds_hybrid plan``: which layout to take, before the machines are rented."""

import argparse
import json
import sys
from pathlib import Path

from ds_hybrid.cli.arguments import add_workload_kinds, count, output_file, workload
from ds_hybrid.config import check
from ds_hybrid.errors import ConfigError
from ds_hybrid.plan.article import article_choice
from ds_hybrid.plan.ds_config import to_ds_config
from ds_hybrid.plan.machine import read_machine
from ds_hybrid.plan.model_file import read_model
from ds_hybrid.plan.report import Comparison, header, to_json, to_text
from ds_hybrid.plan.routing import read_routing
from ds_hybrid.plan.search import Estimate, Request, best_of_sizes, search
from ds_hybrid.topology.hostfile import read_hostfile

_EXAMPLES = """examples:
  ds_hybrid plan --world-size 16 --seq-len 32768 --model qwen3_30b_a3b --cluster a100x8_ib200
  ds_hybrid plan --hostfile hosts --seq-len 4096 --model config.json --cluster h100x8_ib400 --routing trace.npz
  ds_hybrid plan --world-size 16 --seq-len 8192 --model mixtral_8x7b --cluster h200x8_ib400 --rule article
  ds_hybrid plan --world-size 2 --seq-len 256 --model tiny_qwen3_moe --cluster cpu2 --write ds_configs/mine.json
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the sub-command."""
    parser = commands.add_parser(
        "plan",
        help="choose sizes, ZeRO stage and dispatcher for a model and a cluster",
        description="Try every layout of a model on a cluster by arithmetic: memory, time and bytes of a rank. Prints "
        "the ten best, and why others were dropped.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model", required=True, metavar="NAME", help="a table of ds_configs/models, or a Hugging Face config.json"
    )
    parser.add_argument(
        "--cluster", required=True, metavar="NAME", help="a table of ds_configs/machines, or a file of that form"
    )
    parser.add_argument("--seq-len", required=True, type=count, metavar="L", help="tokens of a sequence")
    parser.add_argument("--world-size", type=count, metavar="N", help="ranks; those of the hostfile when there is one")
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="hosts, each of the kind that --cluster names")
    parser.add_argument(
        "--micro-batch", type=count, default=1, metavar="B", help="sequences of a forward (%(default)s)"
    )
    parser.add_argument(
        "--global-batch",
        type=count,
        metavar="N",
        help="sequences of a step, of all ranks (a micro-batch for each rank)",
    )
    parser.add_argument(
        "--zero-stage", type=int, choices=range(4), metavar="STAGE", help="look at this stage alone; default: 0 to 3"
    )
    parser.add_argument(
        "--routing",
        default="zipf:1.0",
        metavar="LAW",
        help="uniform, zipf:S, or a trace: a .npz file or a run's directory (%(default)s)",
    )
    add_workload_kinds(parser)
    parser.add_argument("--rule", choices=("article",), help="also what the article's rule would take, and why not")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument("--write", type=output_file, metavar="FILE", help="write the best as a ds_config")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The report on stdout; 2 when a ds_config is wanted and nothing fits."""
    request = _request(arguments)
    findings = search(request)
    comparison = _comparison(request) if arguments.rule else None
    if arguments.write is not None and findings.fitting:
        _write(arguments.write, request, findings.fitting[0])
        print(
            f"wrote {arguments.write}; train with launch/train.py --deepspeed_config {arguments.write} --seq-len "
            f"{arguments.seq_len} --model (the config.json of {request.model.name})",
            file=sys.stderr,
        )
    if arguments.json:
        print(json.dumps(to_json(request, findings, comparison), indent=2, allow_nan=False))
    else:
        print(to_text(request, findings, comparison))
    if arguments.write is not None and not findings.fitting:
        raise ConfigError(f"--write {arguments.write}: nothing fits, so there is nothing to write.")
    return 0


def _request(arguments: argparse.Namespace) -> Request:
    model, machine = read_model(arguments.model), read_machine(arguments.cluster)
    work = workload(arguments, model)
    if arguments.hostfile is not None:
        cluster = machine.cluster_of(read_hostfile(arguments.hostfile))
        if arguments.world_size not in (None, cluster.num_ranks):
            raise ConfigError(
                f"--world-size {arguments.world_size}: {arguments.hostfile} has {cluster.num_ranks} slots. Leave it "
                "out."
            )
    elif arguments.world_size is not None:
        cluster = machine.cluster(arguments.world_size)
    else:
        raise ConfigError("--world-size: missing. Give the number of ranks, or a --hostfile.")
    stages = (0, 1, 2, 3) if arguments.zero_stage is None else (arguments.zero_stage,)
    law = read_routing(arguments.routing, model)
    return Request(model, work, machine, cluster, law, stages, arguments.global_batch)


def _comparison(request: Request) -> Comparison:
    """The article's sizes, at the ZeRO stage and with the savings that serve them best."""
    choice = article_choice(request.work.seq_len)
    return Comparison(choice, best_of_sizes(request, choice.tp_size, choice.ep_size, choice.mode))


def _write(path: Path, request: Request, best: Estimate) -> None:
    document = to_ds_config(request.model, request.work, best.candidate, header(request, best))
    if (path.parent / "ds_hybrid.schema.json").exists():
        document = {"$schema": "./ds_hybrid.schema.json", **document}
    check(
        document,
        name=str(path),
        world_size=best.candidate.world_size,
        num_experts=request.model.num_experts,
        allow_auto=False,
    )
    path.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")

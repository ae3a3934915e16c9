"""``ds_hybrid trace``: a step of a run for Perfetto."""

import argparse
import json
import sys
from pathlib import Path

from ds_hybrid.cli.arguments import count, output_file
from ds_hybrid.cli.output import write_aside
from ds_hybrid.errors import EventsError
from ds_hybrid.observe.run_directory import find_timelines, read_events
from ds_hybrid.observe.trace import to_trace

_EXAMPLES = """examples:
  ds_hybrid trace runs/observe
  ds_hybrid trace runs/observe --step 120 --out step120.json

Open the file at https://ui.perfetto.dev or in chrome://tracing. The run wrote timelines if its ds_config had
{"ds_hybrid": {"observe": {"directory": "runs/observe"}}}.
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the sub-command."""
    parser = commands.add_parser(
        "trace",
        help="a step of a run, rank by rank, for Perfetto or chrome://tracing",
        description="Write one step as a trace: a track for each rank with what its layers compute and exchange.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="what observe.directory named")
    parser.add_argument("--out", type=output_file, metavar="FILE", help="default: trace.json in RUN_DIR")
    parser.add_argument("--step", type=count, metavar="N", help="default: the last step that has a timeline")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The new file on stdout; what of the run's files was passed over on stderr."""
    events = read_events(arguments.run_dir)
    timelines = find_timelines(arguments.run_dir, events)
    for warning in (*events.warnings, *timelines.warnings):
        print(f"warning: {warning}", file=sys.stderr)
    if not timelines.steps:
        raise EventsError(
            f"{timelines.path}: no step has a timeline. The run had ds_hybrid.observe.timeline = false, ended before "
            "its first record, or could not write (its log has a warning then)."
        )
    timeline = timelines.read(arguments.step or timelines.steps[-1])
    out: Path = arguments.out or arguments.run_dir / "trace.json"
    write_aside(out, json.dumps(to_trace(timeline, events.run_of(timeline.step), events.steps)))
    print(out)
    return 0

"""``ds_hybrid report``: what a run wrote down, as one page to read."""

import argparse
from dataclasses import replace
from pathlib import Path

from ds_hybrid.cli.arguments import count, output_file
from ds_hybrid.cli.output import new_figure, save_figure, write_aside
from ds_hybrid.errors import HybridError
from ds_hybrid.observe.report.digest import settled, view_of
from ds_hybrid.observe.report.figures import figures_of
from ds_hybrid.observe.report.page import page
from ds_hybrid.observe.report.view import RunView
from ds_hybrid.observe.run_directory import find_timelines, read_events

_EXAMPLES = """examples:
  ds_hybrid report runs/observe
  ds_hybrid report runs/observe --out report.html --step 120
  ds_hybrid report runs/observe --png charts

The page needs no network and nothing beside it. It can be written while the run goes on. The run wrote its records if
its ds_config had {"ds_hybrid": {"observe": {"directory": "runs/observe"}}}.
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the sub-command."""
    parser = commands.add_parser(
        "report",
        help="a run as one page: loss, expert load, waiting, bytes, rebalances, advice",
        description="Write one HTML file about a run: loss and throughput, the load of every expert over time, one "
        "step rank by rank, bytes against the lower bound, rebalances, placement, and what to try next.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="what observe.directory named")
    parser.add_argument("--out", type=output_file, metavar="FILE", help="default: report.html in RUN_DIR")
    parser.add_argument("--png", type=Path, metavar="DIR", help="also write the charts as pictures into this folder")
    parser.add_argument(
        "--step", type=count, metavar="N", help="to draw rank by rank. Default: the last that has a timeline"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The new files on stdout."""
    events = settled(read_events(arguments.run_dir))
    timelines = find_timelines(arguments.run_dir, events)
    step = arguments.step or (timelines.steps[-1] if timelines.steps else None)
    view = view_of(
        replace(events, warnings=(*events.warnings, *timelines.warnings)),
        name=arguments.run_dir.resolve().name,
        timeline=None if step is None else timelines.read(step),
        timeline_steps=timelines.steps,
    )
    out: Path = arguments.out or arguments.run_dir / "report.html"
    write_aside(out, page(view))
    print(out)
    if arguments.png is not None:
        _write_pictures(view, arguments.png)
    return 0


def _write_pictures(view: RunView, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HybridError(f"--png {folder}: {error.strerror}. Name a folder.") from error
    for figure in figures_of(view):
        canvas = new_figure(figure.width, figure.height, option="--png")
        figure.draw(canvas)
        path = folder / f"{figure.name}.png"
        save_figure(canvas, path)
        print(path)

"""The ``ds_hybrid`` command. Each sub-command is a file of this folder that ``main`` names."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from ds_hybrid.cli import (
    calibrate,
    doctor,
    export,
    plan,
    report,
    schema,
    simulate,
    simulate_rebalance,
    trace,
    universal,
    validate,
)
from ds_hybrid.errors import HybridError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; the exit status is 2 for whatever the user has to put right."""
    parser = argparse.ArgumentParser(prog="ds_hybrid", description="MoE training on DeepSpeed.")
    parser.add_argument("--version", action="version", version=f"ds_hybrid {version('ds_hybrid')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    validate.add_command(commands)
    schema.add_command(commands)
    doctor.add_command(commands)
    plan.add_command(commands)
    calibrate.add_command(commands)
    simulate.add_command(commands)
    simulate_rebalance.add_command(commands)
    universal.add_command(commands)
    export.add_command(commands)
    report.add_command(commands)
    trace.add_command(commands)
    arguments = parser.parse_args(argv)
    try:
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except HybridError as error:
        print(error, file=sys.stderr)
    except BrokenPipeError:
        # Whoever read has enough, as `| head` has. What is still in the buffer must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())

"""DeepSpeed's .deepspeed_env: the variables that reach the ranks on other hosts, NAME=VALUE lines and nothing else.

DeepSpeed reads the file in the home folder, then the one in the working folder, when a hostfile has more than one host.
``launch/run_hostfile.sh`` reads them here, and hands DeepSpeed a file without comments and blank lines.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_hybrid.doctor.findings import Finding, Severity
from ds_hybrid.problems import Problem

_VARIABLE = re.compile(r"\s*([A-Za-z_][A-Za-z_0-9]*)\s*=(.*)", re.ASCII)
_COMMENT = re.compile(r"\s*(#.*)?")
# A part of what the launcher hands on unasked: the rest has no bearing on what the doctor asks. An environment may hold
# names that are none in a shell.
_HANDED_ON = re.compile(r"PYTHON[A-Za-z_0-9]*", re.ASCII)


@dataclass(frozen=True)
class EnvFiles:
    """The variables of all files, where a later one counts, and the lines that are none."""

    variables: Mapping[str, str]
    findings: tuple[Finding, ...]

    def here(self, environment: Mapping[str, str]) -> dict[str, str]:
        """``environment`` as a rank on this host has it."""
        return {**environment, **{name: os.path.expandvars(value) for name, value in self.variables.items()}}

    def exports(self, environment: Mapping[str, str]) -> str:
        """Shell commands that give another host what a launcher that runs in ``environment`` would give it."""
        kept = {name: value for name, value in environment.items() if _HANDED_ON.fullmatch(name)}
        kept["PYTHONPATH"] = ":".join(filter(None, (os.getcwd(), environment.get("PYTHONPATH"))))
        quoted = {name: shlex.quote(value) for name, value in kept.items()}
        # In double quotes, as DeepSpeed writes them: PATH=/opt/bin:$PATH works there.
        quoted |= {name: f'"{value}"' for name, value in self.variables.items()}
        return "".join(f"export {name}={value}; " for name, value in quoted.items())


def read_env_files(environment: Mapping[str, str], *, severity: Severity) -> EnvFiles:
    """The files that DeepSpeed would read; ``severity`` is that of a wrong line. A comment is a warning."""
    name = environment.get("DS_ENV_FILE", ".deepspeed_env")
    # An absolute name is the same file twice.
    paths = dict.fromkeys(os.path.join(folder, name) for folder in (os.path.expanduser("~"), "."))
    variables: dict[str, str] = {}
    findings: list[Finding] = []
    for path in map(Path, paths):
        if path.is_file():
            read, wrong, comments = parse_env_file(path.read_text(encoding="utf-8", errors="replace"))
            variables |= read
            findings += [Finding(severity, "env_file", problem.line(str(path))) for problem in wrong]
            findings += [Finding("warning", "env_file", problem.line(str(path))) for problem in comments]
    return EnvFiles(variables, tuple(findings))


def parse_env_file(text: str) -> tuple[dict[str, str], list[Problem], list[Problem]]:
    """The variables in ``text``, the lines that are none, and the comments and blank lines."""
    variables: dict[str, str] = {}
    wrong: list[Problem] = []
    comments: list[Problem] = []
    for number, line in enumerate(text.splitlines(), 1):
        place, shown = f"line {number}", line.strip()
        if match := _VARIABLE.fullmatch(line):
            variables[match[1]] = match[2].strip()
        elif _COMMENT.fullmatch(line):
            rule = "DeepSpeed fails at a comment or blank line; launch/run_hostfile.sh leaves it out. Remove it."
            comments.append(Problem(place, rule, shown))
        else:
            rule = "must be NAME=VALUE: DeepSpeed fails there, or hands it on as nonsense. Mend or remove it."
            wrong.append(Problem(place, rule, shown))
    return variables, wrong, comments

"""What is wrong, and how badly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        severity: an error stops a run or makes it wrong; a warning may.
        check: which check found it, a name that does not change.
        message: the place, the value, the rule and the fix, in one line.
    """

    severity: Severity
    check: str
    message: str


def exit_status(findings: Iterable[Finding]) -> int:
    """2 with an error among them, 1 with warnings alone, 0 with nothing."""
    severities = {finding.severity for finding in findings}
    return 2 if "error" in severities else 1 if severities else 0

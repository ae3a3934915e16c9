"""Errors a user can cause. Each message names the place, the value, the rule and the fix.

What only a bug can cause is an ``assert``.
"""


class HybridError(ValueError):
    """Base of every error that ds_hybrid raises on purpose."""


class ConfigError(HybridError):
    """A ds_config, or a value given in its place, breaks a rule. ``problems`` holds one line each."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class TopologyError(HybridError):
    """A hostfile, a link table or a running machine does not describe a usable cluster."""


class PlacementError(HybridError):
    """Experts and slots do not match one to one, experts cannot move, or a routing trace cannot be read or replayed."""


class DispatchError(HybridError):
    """The ranks of an expert-parallel group disagree, or a dispatcher got tensors it cannot move."""


class CheckpointError(HybridError):
    """A checkpoint does not fit the run that loads it."""


class EventsError(HybridError):
    """What a run writes down about itself cannot be written, or cannot be read."""

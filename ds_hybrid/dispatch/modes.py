"""The dispatchers by name."""

from typing import Literal

Mode = Literal["alltoall", "allgather", "two_stage"]
MODES: tuple[Mode, ...] = ("alltoall", "allgather", "two_stage")

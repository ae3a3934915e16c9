"""First the routing to everyone, then each token once to each rank that needs it; one partial sum comes back.

Rows on the wire equal the lower bound for any routing.
"""

from __future__ import annotations

from typing import Any

from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.hops import Hop, HopsDispatcher


class TwoStageDispatcher(HopsDispatcher):
    """AllGather-EP in two stages: one hop over the whole group."""

    mode = "two_stage"

    def __init__(self, group: RankGroup, **options: Any) -> None:
        super().__init__(group, [Hop(group, tuple(range(group.size)))], **options)

"""An exchange that failed, in words: which layer, and which ranks did not come."""

from __future__ import annotations

import threading
import time

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.errors import DispatchError

_GRACE_SECONDS = 3.0
_STORE_SECONDS = 5.0


def explained(error: RuntimeError, group: RankGroup, *, layer: str) -> DispatchError:
    """What to raise in place of a backend's error in the first exchange of a call.

    Ranks that wait for one another give up at about the same time. Each leaves a note in torch's store; who has left
    none after a while did not come.
    """
    ranks = dist.get_process_group_ranks(group.process_group)
    missing: list[int] = []
    # In a thread that nobody waits for: a store on a host that has fallen silent never answers.
    asking = threading.Thread(target=_find_ranks_without_note, args=(ranks, layer, missing), daemon=True)
    asking.start()
    asking.join(_GRACE_SECONDS + _STORE_SECONDS)
    which = f"ranks {', '.join(map(str, missing))}" if missing else "some ranks"
    return DispatchError(
        f"{layer}: {which} of the expert-parallel group {ranks} did not come to its exchange. Every rank must call the "
        f"layer as often as the others, in evaluation too, if need be with no tokens. The backend says: {error}"
    )


def _find_ranks_without_note(ranks: list[int], layer: str, missing: list[int]) -> None:
    """Leave a note, and put into ``missing`` who leaves none; nobody where the store is gone."""
    store = distributed_c10d._get_default_store()
    keys = {rank: f"ds_hybrid/{layer}/failed at rank {rank}" for rank in ranks}
    try:
        store.set(keys[dist.get_rank()], "")
        deadline = time.monotonic() + _GRACE_SECONDS
        while (without := [rank for rank in ranks if not store.check([keys[rank]])]) and time.monotonic() < deadline:
            time.sleep(0.1)
    except RuntimeError:  # the rank that keeps it has ended
        return
    missing.extend(without)

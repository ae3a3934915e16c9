"""Keys and values passed on from rank to rank while they are computed with: ``"ring"`` (Ring Attention).

Forward: while a rank computes with a shard, it sends it on and receives the one before. Backward: shards go round
again, each followed by its gradients, to which every rank adds its own. A rank's gradients from its own queries stay
where they are; half of them is computed at the beginning, while the first shard is on its way, and half at the end,
while the last gradients come home.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ds_hybrid.attention.exchange import Arrival, Exchanges, KVFormat
from ds_hybrid.attention.masks import Sight, split_work
from ds_hybrid.attention.passes import BackwardPass, ForwardPass, KVBlock


@dataclass(frozen=True)
class Ring:
    """What both passes of a call share.

    Attributes:
        kv: keys and values as they travel.
    """

    exchanges: Exchanges
    sight: Sight
    kv: KVFormat

    @property
    def num_ranks(self) -> int:
        return self.sight.shards.num_ranks

    def depart(self, own: KVBlock) -> Arrival:
        """The own shard, to the next rank."""
        return self.exchanges.shift(lambda: self.kv.pack(own.key, own.value), own.key, own.value)

    def pass_on(self, rows: Tensor) -> Arrival:
        return self.exchanges.shift(lambda: rows, rows)

    def send_gradients(self, rows: Tensor) -> Arrival:
        """Sums of gradients, to the next rank, in the dtype of the values."""
        return self.exchanges.shift(lambda: rows.to(self.kv.dtype), rows)

    def arrived(self, wire: Tensor, step: int) -> KVBlock:
        """The shard that came with the ``step``-th hop: of the rank so many places before."""
        key, value = self.kv.unpack(wire)
        return KVBlock(self.sight.shards.block((self.sight.rank - step) % self.num_ranks), key, value)


def ring_forward(call: Ring, own: KVBlock, run: ForwardPass) -> None:
    """All shards, the own one first."""
    if call.num_ranks == 1:
        run.add(own)
        return
    coming = call.depart(own)
    run.add(own)
    for step in range(1, call.num_ranks):
        wire = coming.wait()
        if step + 1 < call.num_ranks:
            coming = call.pass_on(wire)
        run.add(call.arrived(wire, step))


def ring_backward(call: Ring, own: KVBlock, run: BackwardPass) -> tuple[Tensor, Tensor]:
    """Gradients of the rank's own keys and values."""
    if call.num_ranks == 1:
        return run.gradients(own)
    coming = call.depart(own)
    first, last = split_work(call.sight.tiles(own.of, -(-call.sight.shards.shard_length // 2)))
    grad_key, grad_value = run.gradients(own, first)
    wire = coming.wait()
    if call.num_ranks > 2:
        coming = call.pass_on(wire)
    going: Arrival | None = None
    for step in range(1, call.num_ranks):
        gradients = call.kv.join_gradients(*run.gradients(call.arrived(wire, step)))
        if going is not None:
            gradients += going.wait()
        # The next shard leaves before these gradients: it is needed sooner.
        if step + 1 < call.num_ranks:
            wire = coming.wait()
        if step + 2 < call.num_ranks:
            coming = call.pass_on(wire)
        going = call.send_gradients(gradients)
    halves = run.gradients(own, last)
    assert going is not None
    home = call.kv.split_gradients(going.wait())
    return grad_key + halves[0] + home[0], grad_value + halves[1] + home[1]

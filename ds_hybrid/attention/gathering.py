"""Keys and values gathered from all ranks: ``"whole"``, or in pieces, ``"blocks"``.

``"whole"`` is the article's idea: all keys come first, then all values, under the scores. A fused kernel does not stop
between scores and output, so the scores that are made under the values are plain matrix products, and are held. To keep
memory from growing with the square of the length, at most ``SCORES_BYTES`` of them are; what is left is computed by the
fused kernel when the values are there. Its backward has all keys and values, and gathers nothing.

``"blocks"`` has several pieces under way and computes the rank's own block meanwhile, then each piece as it comes.

Both send gradients home piece by piece, each under the compute of the next, and keep half of their own block for the
time when the last ones are on their way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from ds_hybrid.attention.choose import SCORES_BYTES, Schedule
from ds_hybrid.attention.exchange import Arrival, Exchanges, KVFormat
from ds_hybrid.attention.masks import Sight, Tile, split_work
from ds_hybrid.attention.passes import BackwardPass, ForwardPass, KVBlock
from ds_hybrid.attention.shards import TokenBlock

_SCORES_ROWS = 512


@dataclass(frozen=True)
class Gathering:
    """What both passes of a call share.

    Attributes:
        kv: keys and values as they travel together.
    """

    schedule: Schedule
    exchanges: Exchanges
    sight: Sight
    kv: KVFormat

    @property
    def rank(self) -> int:
        return self.sight.rank

    @property
    def num_ranks(self) -> int:
        return self.sight.shards.num_ranks

    @property
    def num_pieces(self) -> int:
        return len(self.piece_rows)

    @cached_property
    def piece_rows(self) -> tuple[tuple[slice, ...], ...]:
        """Where in a shard the rows of each piece lie."""
        return self.sight.shards.piece_rows(self.schedule.num_pieces)

    @cached_property
    def _pieces(self) -> tuple[tuple[TokenBlock, ...], ...]:
        return tuple(self.sight.shards.pieces(rank, self.schedule.num_pieces) for rank in range(self.num_ranks))

    def piece(self, of_shard: Tensor, number: int) -> Tensor:
        """[B, KV, shard_length, D] -> [B, KV, R, D]."""
        return torch.cat([of_shard[:, :, rows] for rows in self.piece_rows[number]], 2)

    def piece_of(self, rank: int, number: int) -> TokenBlock:
        return self._pieces[rank][number]

    def others(self) -> Sequence[int]:
        """The other ranks, the nearest first."""
        return [(self.rank - step) % self.num_ranks for step in range(1, self.num_ranks)]

    def gather_piece(self, key: Tensor, value: Tensor, number: int) -> Arrival:
        return self.exchanges.gather(
            lambda: self.kv.pack(self.piece(key, number), self.piece(value, number)), key, value
        )

    def arrived(self, wire: Tensor, number: int) -> Iterator[KVBlock]:
        """The piece of each other rank, from what was gathered."""
        of_rank = wire.chunk(self.num_ranks)
        for rank in self.others():
            key, value = self.kv.unpack(of_rank[rank])
            yield KVBlock(self.piece_of(rank, number), key, value)

    @property
    def num_kept(self) -> int:
        """Pieces that stay for a backward; the same on every rank."""
        wire_bytes = self.kv.row_bytes * self.sight.shards.padded_length
        return replace(self.schedule, num_pieces=self.num_pieces).num_kept(wire_bytes)


def blocks_forward(call: Gathering, own: KVBlock, run: ForwardPass) -> list[Tensor]:
    """Returns the pieces that are kept, as they came."""
    coming = _under_way(partial(call.gather_piece, own.key, own.value), range(call.num_pieces), call.schedule.in_flight)
    run.add(own)
    kept: list[Tensor] = []
    for number, wire in coming:
        for block in call.arrived(wire, number):
            run.add(block)
        if len(kept) < call.num_kept:
            kept.append(wire)
    return kept


def blocks_backward(call: Gathering, own: KVBlock, run: BackwardPass, kept: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Gradients of the rank's own keys and values."""
    missing = range(len(kept), call.num_pieces)
    coming = _under_way(partial(call.gather_piece, own.key, own.value), missing, call.schedule.in_flight)

    def pieces() -> Iterator[tuple[int, Iterator[KVBlock]]]:
        for number, wire in enumerate(kept):
            yield number, call.arrived(wire, number)
        for number, wire in coming:
            yield number, call.arrived(wire, number)

    return _backward(call, own, run, pieces())


def whole_forward(call: Gathering, own: KVBlock, run: ForwardPass) -> list[Tensor]:
    """Returns all keys and all values, as they came."""
    keys, values = _formats(call)
    key_wire = call.exchanges.gather(lambda: keys.pack(own.key), own.key).wait()
    arriving = call.exchanges.gather(lambda: values.pack(own.value), own.value)
    key_of = _by_rank(call, keys, key_wire, own.key)
    todo = deque(
        (rank, tile)
        for rank in range(call.num_ranks)
        for tile in call.sight.tiles(call.sight.shards.block(rank), _SCORES_ROWS)
    )
    held: list[tuple[int, Tile, Tensor]] = []
    num_bytes = 0
    while todo and num_bytes < SCORES_BYTES:
        rank, tile = todo.popleft()
        scores = run.scores(call.sight.shards.block(rank), key_of[rank], tile)
        num_bytes += scores.numel() * scores.element_size()
        held.append((rank, tile, scores))
    value_wire = arriving.wait()
    value_of = _by_rank(call, values, value_wire, own.value)
    for rank, tile, scores in held:
        run.add_scores(scores, value_of[rank], tile)
    held.clear()
    for rank, tile in todo:
        run.add_tile(KVBlock(call.sight.shards.block(rank), key_of[rank], value_of[rank]), tile)
    return [key_wire, value_wire]


def whole_backward(call: Gathering, own: KVBlock, run: BackwardPass, kept: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Gradients of the rank's own keys and values."""
    keys, values = _formats(call)
    key_wire, value_wire = kept
    key_of = _by_rank(call, keys, key_wire, own.key)
    value_of = _by_rank(call, values, value_wire, own.value)

    def blocks(number: int) -> Iterator[KVBlock]:
        for rank in call.others():
            of = call.piece_of(rank, number)
            yield KVBlock(of, call.piece(key_of[rank], number), call.piece(value_of[rank], number))

    return _backward(call, own, run, ((number, blocks(number)) for number in range(call.num_pieces)))


def _backward(
    call: Gathering, own: KVBlock, run: BackwardPass, pieces: Iterator[tuple[int, Iterator[KVBlock]]]
) -> tuple[Tensor, Tensor]:
    """Half of the own block, each piece with its gradients sent home, the other half; and what comes home."""
    first, last = split_work(call.sight.tiles(own.of, -(-call.sight.shards.shard_length // 2)))
    grad_key, grad_value = run.gradients(own, first)
    going: deque[tuple[int, Arrival]] = deque()

    def take_home() -> None:
        number, arrival = going.popleft()
        parts = call.kv.split_gradients(arrival.wait())
        for whole, part in zip((grad_key, grad_value), parts, strict=True):
            lengths = [rows.stop - rows.start for rows in call.piece_rows[number]]
            for rows, of_run in zip(call.piece_rows[number], part.split(lengths, 2), strict=True):
                whole[:, :, rows] += of_run

    for number, blocks in pieces:
        gradients = {block.of.rank: run.gradients(block) for block in blocks}
        if gradients:
            going.append((number, _send_home(call, gradients)))
        if len(going) > call.schedule.in_flight:
            take_home()
    for whole, part in zip((grad_key, grad_value), run.gradients(own, last), strict=True):
        whole += part
    while going:
        take_home()
    return grad_key, grad_value


def _send_home(call: Gathering, gradients: dict[int, tuple[Tensor, Tensor]]) -> Arrival:
    """Each rank's part to it. Its own part is added where it is computed, and is zero here."""

    def pack() -> Tensor:
        rows = {rank: call.kv.join_gradients(*parts).to(call.kv.dtype) for rank, parts in gradients.items()}
        nothing = torch.zeros_like(next(iter(rows.values())))
        return torch.cat([rows.get(rank, nothing) for rank in range(call.num_ranks)])

    return call.exchanges.reduce_scatter(pack, *(part for parts in gradients.values() for part in parts))


def _under_way(start: Callable[[int], Arrival], numbers: Sequence[int], most: int) -> Iterator[tuple[int, Tensor]]:
    """Starts the first ``most`` exchanges at once, and another one whenever one has come."""
    going = deque(start(number) for number in numbers[:most])

    def arrivals() -> Iterator[tuple[int, Tensor]]:
        for place, number in enumerate(numbers):
            wire = going.popleft().wait()
            if place + most < len(numbers):
                going.append(start(numbers[place + most]))
            yield number, wire

    return arrivals()


def _formats(call: Gathering) -> tuple[KVFormat, KVFormat]:
    """Of keys alone, and of values alone."""
    key_dim, value_dim = call.kv.dims
    return replace(call.kv, dims=(key_dim,)), replace(call.kv, dims=(value_dim,))


def _by_rank(call: Gathering, kind: KVFormat, wire: Tensor, own: Tensor) -> list[Tensor]:
    """Keys or values of each rank; its own unrounded."""
    return [own if rank == call.rank else kind.unpack(rows)[0] for rank, rows in enumerate(wire.chunk(call.num_ranks))]

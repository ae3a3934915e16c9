"""Experts move to other ranks with their weights, masters and optimizer state: a round all at once, or not at all.

Between an optimizer step and the next forward. A round moves at most one expert from each rank and one to it, so what
is staged is at most the state of two. Only when every rank has received and checked its part is anything overwritten,
and from then on nothing is left that could fail; the layer's placement changes with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hybrid.dispatch.collectives import RankGroup
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.errors import PlacementError
from ds_hybrid.moe.kinds import MoELayer
from ds_hybrid.moe.layer import MoE
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance.fragments import Fragment, StateFinder, num_elements
from ds_hybrid.rebalance.rounds import Round, plan_rounds
from ds_hybrid.rebalance.transfers import Extent, Holding, Part, Transfer, bytes_of_state, transfers_of

CHECK_BYTES = 16
"""Of the checksum at the end of what a rank sends to another in a round."""
_WORD_BYTES = 8
_CHUNK_WORDS = 2**20


@dataclass(frozen=True)
class ExpertGrid:
    """The ranks that hold one model's experts.

    Attributes:
        ranks: [D][P], by the share of an expert's state, and by the place in an expert-parallel group.
        replicas: the process group of the D ranks that hold what this one holds.
    """

    ranks: tuple[tuple[int, ...], ...]
    replicas: Any = field(compare=False)


@dataclass(frozen=True)
class MoveReport:
    """What moving cost this rank.

    Attributes:
        num_moved: experts that changed their rank, in all layers.
        num_rounds: in all layers.
        bytes_predicted: that leave this rank, from the plan alone.
        bytes_sent: that left it.
        bytes_staged: the most that was held at once besides the model.
    """

    num_moved: int
    num_rounds: int
    bytes_predicted: int
    bytes_sent: int
    bytes_staged: int


@dataclass(frozen=True)
class _SlotTensor:
    """One tensor of the expert in a slot: a run of a parameter or buffer."""

    tensor: Tensor
    start: int
    length: int


@dataclass(frozen=True)
class _LayerPlan:
    """What this rank does for a layer.

    Attributes:
        live: by slot, the live elements of each part that lie on this rank, as :class:`Extent` tells.
        holdings: of each of the D replicas.
    """

    layer: MoELayer
    grid: ExpertGrid
    rounds: tuple[Round, ...]
    live: Mapping[int, Mapping[Part, Fragment]]
    holdings: Sequence[Holding]

    def transfers(self, planned: Round) -> list[Transfer]:
        return list(transfers_of(planned, self.holdings, self.grid.ranks, rank=dist.get_rank()))

    def view(self, slot: int, transfer: Transfer) -> Tensor:
        """The live elements of a transfer's span, as bytes."""
        fragment = self.live[slot][transfer.part]
        start, stop = (index - fragment.start for index in transfer.span)
        return fragment.values[start:stop].view(torch.uint8)


def move_experts(
    layers: Sequence[MoELayer], targets: Mapping[str, ExpertPlacement], grids: Mapping[int, ExpertGrid], optimizer: Any
) -> MoveReport:
    """Bring the experts to the ranks that ``targets`` names; the slots there are chosen for the fewest bytes.

    Collective over all ranks, between an optimizer step and the next forward.

    Args:
        layers: all of the model, in one order on every rank.
        targets: by layer name; layers that are not named stay.
        grids: by the number of expert-parallel ranks.
        optimizer: ``engine.optimizer``.

    Raises:
        PlacementError: on every rank: the ranks disagree on what to move, an optimizer whose state cannot move, or a
            rank that could not stage or did not receive what was sent. Rounds that were complete before stay, those of
            other layers too; ``layer.placement`` tells.
    """
    plans = _agreed_plans(layers, targets, grids, optimizer)
    world = RankGroup(dist.get_world_group(), Meter())
    predicted, staged = 0, 0
    for plan in plans:
        for planned in plan.rounds:
            transfers = plan.transfers(planned)
            outgoing = _by_peer((one for one in transfers if one.source == world.rank), "target", world.size)
            incoming = _by_peer((one for one in transfers if one.target == world.rank), "source", world.size)
            predicted += sum(_sizes(outgoing))
            staged = max(staged, _carry_out(plan, planned, outgoing, incoming, world))
    rounds = [planned for plan in plans for planned in plan.rounds]
    return MoveReport(
        num_moved=sum(len(planned.moves) for planned in rounds),
        num_rounds=len(rounds),
        bytes_predicted=predicted,
        bytes_sent=world.meter.take().payload,
        bytes_staged=staged,
    )


_Live = dict[int, dict[Part, Fragment]]
_Described = dict[int, dict[Part, Extent]]


def _holding(layer: MoELayer, finder: StateFinder) -> tuple[_Live, _Described]:
    """What this rank holds of a layer's experts by slot and part: live, and described.

    Raises:
        PlacementError: the optimizer's state cannot move, or it has not stepped all experts as often.
    """
    live: _Live = {}
    described: _Described = {}
    numbers: dict[str, float] = {}
    for slot, tensors in enumerate(_slot_tensors(layer)):
        live[slot], described[slot] = {}, {}
        for number, tensor in enumerate(tensors):
            for name, fragment in finder.fragments(tensor.tensor).items():
                cut = _cut(fragment, tensor)
                if len(cut.values):
                    span = (cut.start, cut.start + len(cut.values))
                    live[slot][number, name] = cut
                    described[slot][number, name] = Extent(span, cut.values.element_size())
            for name, value in finder.numbers(tensor.tensor).items():
                if numbers.setdefault(name, value) != value:
                    raise PlacementError(
                        f"{layer.layer_name}: the optimizer's {name!r} is {numbers[name]} for one expert and {value} "
                        "for another; it must be the same for all. Step all experts together."
                    )
    return live, described


def _slot_tensors(layer: MoELayer) -> Iterator[list[_SlotTensor]]:
    if isinstance(layer, MoE):
        for expert in layer.deepspeed_moe.experts.deepspeed_experts:
            yield [_SlotTensor(one, 0, num_elements(one)) for one in chain(expert.parameters(), expert.buffers())]
        return
    for slot in range(layer.placement.num_slots):
        lengths = [(one, num_elements(one) // layer.placement.num_slots) for one in layer.experts.parameters()]
        yield [_SlotTensor(one, slot * length, length) for one, length in lengths]


def _cut(fragment: Fragment, tensor: _SlotTensor) -> Fragment:
    """What of a fragment belongs to one expert's tensor, counted from that tensor's first element."""
    first = max(fragment.start, tensor.start)
    stop = max(first, min(fragment.start + len(fragment.values), tensor.start + tensor.length))
    return Fragment(fragment.values[first - fragment.start : stop - fragment.start], first - tensor.start)


def _agreed_plans(
    layers: Sequence[MoELayer], targets: Mapping[str, ExpertPlacement], grids: Mapping[int, ExpertGrid], optimizer: Any
) -> list[_LayerPlan]:
    """The plan of each layer, when all ranks have the same."""
    fault = None
    strangers = sorted(targets.keys() - {layer.layer_name for layer in layers})
    layers = [layer for layer in layers if layer.layer_name in targets]
    rounds: list[tuple[Round, ...]] = []
    held: list[tuple[_Live, _Described]] = []
    finder = StateFinder(optimizer)
    try:
        if strangers:
            raise PlacementError(f"the model has no MoE layer {strangers[0]!r}")
        rounds = [plan_rounds(layer.placement, targets[layer.layer_name]) for layer in layers]
        held = [_holding(layer, finder) for layer in layers]
    except (PlacementError, RuntimeError, LookupError, StopIteration) as error:
        fault = str(error)
    _agree(fault, doing="plan the moves")
    _compare(
        [(layer.layer_name, layer.placement.digest, *planned) for layer, planned in zip(layers, rounds, strict=True)]
    )

    replicas: dict[int, list[list[_Described]]] = {}
    for ep_size, grid in grids.items():
        of_replica: list[list[_Described]] = [[]] * len(grid.ranks)
        dist.all_gather_object(of_replica, [described for _, described in held], group=grid.replicas)
        replicas[ep_size] = of_replica
    plans = [
        _LayerPlan(
            layer,
            grids[layer.ep_size],
            rounds[number],
            held[number][0],
            [one[number] for one in replicas[layer.ep_size]],
        )
        for number, layer in enumerate(layers)
    ]
    _compare([plan.holdings for plan in plans])
    return plans


def _carry_out(
    plan: _LayerPlan,
    planned: Round,
    outgoing: Sequence[Sequence[Transfer]],
    incoming: Sequence[Sequence[Transfer]],
    world: RankGroup,
) -> int:
    """Stage, exchange, check and commit one round; the bytes that were staged. Transfers are by the other's rank."""
    name = plan.layer.layer_name
    fault, sent = None, torch.empty(0, dtype=torch.uint8)
    try:
        sent = _pack(plan, outgoing)
    except RuntimeError as error:  # no memory for it
        fault = str(error)
    _agree(fault, doing=f"{name}: stage what moves")
    received = world.all_to_all(sent[:, None], _sizes(outgoing), _sizes(incoming)).wait()[:, 0]
    arrived = received.split(_sizes(incoming))
    wrong = [rank for rank, message in enumerate(arrived) if not _is_whole(message)]
    _agree(f"what rank {wrong[0]} sent came otherwise" if wrong else None, doing=f"{name}: receive experts")
    for message, expected in zip(arrived, incoming, strict=True):
        for one, part in _parts(message, expected):
            plan.view(one.move.target[1], one).copy_(part)
    plan.layer.place(planned.placement)
    return len(sent) + len(received)


def _by_peer(transfers: Iterator[Transfer], end: str, num_ranks: int) -> list[list[Transfer]]:
    of_peer: list[list[Transfer]] = [[] for _ in range(num_ranks)]
    for one in transfers:
        of_peer[getattr(one, end)].append(one)
    return of_peer


def _sizes(of_peer: Sequence[Sequence[Transfer]]) -> list[int]:
    """The bytes for each peer: its parts, filled up to whole words, and their checksum."""
    payloads = [sum(one.num_bytes for one in theirs) for theirs in of_peer]
    return [-(-payload // _WORD_BYTES) * _WORD_BYTES + CHECK_BYTES if payload else 0 for payload in payloads]


def _parts(message: Tensor, transfers: Sequence[Transfer]) -> Iterator[tuple[Transfer, Tensor]]:
    """Each transfer with its bytes in the message."""
    parts = message[: sum(one.num_bytes for one in transfers)].split([one.num_bytes for one in transfers])
    return zip(transfers, parts, strict=True)


def _pack(plan: _LayerPlan, outgoing: Sequence[Sequence[Transfer]]) -> Tensor:
    """[bytes] uint8 on the device: the messages to all ranks, one after the other."""
    sizes = _sizes(outgoing)
    packed = torch.zeros(sum(sizes), dtype=torch.uint8, device=get_accelerator().current_device_name())
    for message, theirs in zip(packed.split(sizes), outgoing, strict=True):
        for one, part in _parts(message, theirs):
            part.copy_(plan.view(one.move.source[1], one))
        if theirs:
            message[-CHECK_BYTES:].copy_(_checksum(message[:-CHECK_BYTES]))
    return packed


def _checksum(message: Tensor) -> Tensor:
    """[16] uint8: the sum of the message's words, and their sum weighted by place, as Fletcher's checksum has it."""
    plain = torch.zeros((), dtype=torch.int64, device=message.device)
    weighted = plain.clone()
    for number, chunk in enumerate(message.view(torch.int64).split(_CHUNK_WORDS)):
        total = chunk.sum()
        places = torch.arange(1, len(chunk) + 1, device=message.device)
        plain += total
        weighted += (chunk * places).sum() + number * _CHUNK_WORDS * total
    return torch.stack([plain, weighted]).view(torch.uint8)


def _is_whole(message: Tensor) -> bool:
    if not len(message):
        return True
    return torch.equal(_checksum(message[:-CHECK_BYTES]), message[-CHECK_BYTES:])


def _agree(fault: str | None, *, doing: str) -> None:
    """Raise on every rank when any has a fault. Collective over all ranks."""
    flag = torch.tensor([fault is not None], dtype=torch.int64, device=get_accelerator().current_device_name())
    dist.all_reduce(flag)
    if int(flag):
        of_rank: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(of_rank, fault)
        first = next(rank for rank, theirs in enumerate(of_rank) if theirs is not None)
        raise PlacementError(
            f"rank {first} could not {doing}: {of_rank[first]}. Nothing of this round has moved; every layer is whole."
        )


def _compare(plans: object) -> None:
    """Raise on every rank when they have other plans. Collective over all ranks."""
    digest = int.from_bytes(hashlib.sha256(repr(plans).encode()).digest()[:8], "little") >> 1
    lowest = torch.tensor([digest, -digest], device=get_accelerator().current_device_name())
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    alike = int(lowest[0]) == -int(lowest[1])
    _agree(None if alike else "find the same plan as the others", doing="begin")


def expert_bytes(layer: MoELayer, finder: StateFinder) -> int:
    """The most bytes that this rank holds of one expert: what an expert that comes here brings along."""
    _, described = _holding(layer, finder)
    return max(bytes_of_state(described, slot) for slot in described)

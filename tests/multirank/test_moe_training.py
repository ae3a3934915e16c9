"""Training with ``ds_hybrid.MoE`` against one process: parameters, norms, clipping, auxiliary loss, bias; in fp32."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_hybrid import ConfigError
from ds_hybrid.topology import probe
from tests.multirank.explicit import (
    EXPERTS,
    HIDDEN,
    Setup,
    Toy,
    batch,
    initial_parameters,
    logical_parameters,
    loss_of,
    make_engine,
    reference_forward,
    train,
    train_reference,
    worst_error,
)
from tests.ranks import RankPool

TOLERANCE = 1e-5
STAGES = pytest.mark.parametrize("zero_stage", [0, 1, 2])
NORM = 43.81780460041329
"""Expert j = 0..3 has 64 gradient values of j + 1: sqrt(64 x (1 + 4 + 9 + 16))."""

SETUPS = {
    "k = 1": Setup(k=1),
    "k = 3, without expert parallelism": Setup(k=3, ep_size=1),
    "two micro-batches": Setup(accumulation=2),
    "clipped": Setup(clip=0.05),
    "clipped, without expert parallelism": Setup(clip=0.05, ep_size=1),
    "unequal tokens, one rank empty": Setup(lengths=(9, 0)),
    "recomputed": Setup(checkpointing=False),
    "recomputed reentrantly": Setup(checkpointing=True),
    "recomputed by DeepSpeed": Setup(checkpointing="deepspeed"),
    "without auxiliary loss": Setup(aux=0.0),
    "in chunks": Setup(dispatch={"overlap_chunks": 3}),
    "in chunks, recomputed": Setup(dispatch={"overlap_chunks": 2}, checkpointing=False, lengths=(9, 1)),
}


@STAGES
@pytest.mark.parametrize("name", SETUPS)
def test_trains_like_one_process(two_ranks: RankPool, name: str, zero_stage: int) -> None:
    """G1, G2, G5, U3, A1: every parameter after three steps, and every gradient norm that is reported."""
    setup = replace(SETUPS[name], zero_stage=zero_stage)
    for error, norm_error in two_ranks.run(errors_of_training, setup):
        assert error <= TOLERANCE
        assert norm_error <= TOLERANCE


@pytest.mark.parametrize("mode", ["alltoall", "allgather", "two_stage"])
@pytest.mark.parametrize("ep_size", [2, 4])
def test_every_dispatcher_trains_alike_with_replicas(four_ranks: RankPool, mode: str, ep_size: int) -> None:
    """G2 with two replicas of each expert, and with none."""
    setup = Setup(ep_size=ep_size, k=3, clip=0.05, lengths=(6, 1, 9, 4), options={"dispatch": mode})
    for error, norm_error in four_ranks.run(errors_of_training, setup):
        assert error <= TOLERANCE
        assert norm_error <= TOLERANCE


@pytest.mark.parametrize("where", ["argument", "ds_config"])
def test_hierarchical_over_two_nodes_trains_like_one_process(four_ranks: RankPool, where: str) -> None:
    options, dispatch = ({"dispatch": "hierarchical"}, {}) if where == "argument" else ({}, {"mode": "hierarchical"})
    setup = Setup(ep_size=4, k=3, clip=0.05, lengths=(6, 1, 9, 4), options=options, dispatch=dispatch)
    for error, norm_error in four_ranks.run(errors_over_two_nodes, setup):
        assert error <= TOLERANCE
        assert norm_error <= TOLERANCE


@STAGES
@pytest.mark.parametrize("ep_size", [1, 2])
def test_norm_is_that_of_all_experts(two_ranks: RankPool, zero_stage: int, ep_size: int) -> None:
    """G1 with its numbers: gradient (j + 1) for all of expert j's weights, 0 elsewhere, clipped to 1, step 1."""
    setup = Setup(zero_stage=zero_stage, ep_size=ep_size, clip=1.0, learning_rate=1.0, num_steps=1)
    for norm, steps in two_ranks.run(clipped_steps, setup):
        assert norm == pytest.approx(NORM, rel=1e-6)
        assert steps == pytest.approx({j: (j + 1) / NORM for j in steps}, rel=1e-5)


def test_routers_stay_equal(four_ranks: RankPool) -> None:
    """G3: after 20 steps with unequal tokens, bit for bit."""
    gates = four_ranks.run(trained_gate, Setup(num_steps=20, lengths=(6, 1, 9, 4), learning_rate=0.05))
    assert all(torch.equal(gate, gates[0]) for gate in gates)
    assert not torch.equal(gates[0], initial_gate())


@STAGES
def test_overflow_of_one_expert_stops_all_ranks(two_ranks: RankPool, zero_stage: int) -> None:
    """G4, in bf16: an infinite gradient of one expert on rank 1."""
    for skipped, changed in two_ranks.run(step_with_overflow, Setup(zero_stage=zero_stage, bf16=True, num_steps=1)):
        assert skipped == 1
        assert not changed


@STAGES
def test_auxiliary_loss_has_one_scale(two_ranks: RankPool, zero_stage: int) -> None:
    """G5: the gate's step from the auxiliary loss alone is that of the mean over micro-batches and ranks."""
    for errors in two_ranks.run(auxiliary_step_errors, zero_stage):
        assert max(errors) <= TOLERANCE


def test_auxiliary_loss_is_returned_and_not_added(two_ranks: RankPool) -> None:
    """G6: what the caller adds is counted exactly once."""
    for with_aux, without, l_aux in two_ranks.run(losses_with_and_without_aux):
        assert with_aux - without == pytest.approx(0.1 * l_aux, rel=1e-6)


def test_bias_moves_once_per_step_on_all_ranks_counts(two_ranks: RankPool) -> None:
    """B2: by the rate, from the counts of both ranks and both micro-batches, also when the forward is recomputed."""
    results = [two_ranks.run(trained_bias, checkpointing) for checkpointing in (None, True, False, "deepspeed")]
    for bias, load in (result for ranks in results for result in ranks):
        total = torch.tensor(load, dtype=torch.float64)
        assert int(total.sum()) == 2 * 2 * 6 * 2  # ranks, micro-batches, tokens, choices
        torch.testing.assert_close(bias, (0.01 * torch.sign(total.mean() - total)).float())


def test_skipped_step_does_not_move_the_bias(two_ranks: RankPool) -> None:
    for bias in two_ranks.run(bias_after_overflow):
        assert bias == [0.0] * EXPERTS


@STAGES
def test_resumes_where_it_stopped(two_ranks: RankPool, tmp_path: Path, zero_stage: int) -> None:
    """B2, C4: parameters of every expert and the bias, float32, are those of the run that was not interrupted."""
    setup = Setup(zero_stage=zero_stage, num_steps=2, options={"bias_update_rate": 0.01})
    for error, bias_dtype, bias_equal in two_ranks.run(resume, setup, str(tmp_path)):
        assert error == 0.0
        assert bias_dtype == "torch.float32"
        assert bias_equal


def test_zero_stage_3_is_refused_on_every_rank(two_ranks: RankPool) -> None:
    message = "zero_optimization.stage = 3: moe is a ds_hybrid.MoE, which DeepSpeed trains with stages 0, 1 and 2."
    assert two_ranks.run(message_of_stage_3) == [message, message]


def test_stats_count_explicit_layers(two_ranks: RankPool) -> None:
    for name, num_tokens, load in two_ranks.run(stats_of_one_step):
        assert name == "moe"
        assert num_tokens == 12
        assert load == 24


def test_ds_config_chooses_the_dispatcher_where_the_layer_does_not(two_ranks: RankPool) -> None:
    assert two_ranks.run(modes_of_layers) == [("allgather", "alltoall")] * 2


def errors_over_two_nodes(setup: Setup) -> tuple[float, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "key_of_this_host", lambda: f"node {dist.get_rank() // 2}")
        return errors_of_training(setup)


def errors_of_training(setup: Setup) -> tuple[float, float]:
    trained = train(make_engine(setup, Toy(setup)), setup)
    assert all(map(math.isfinite, trained.norms))
    reference = train_reference(setup, dist.get_world_size())
    norm_errors = [
        abs(norm - expected) / expected
        for norm, expected in zip(trained.norms, reference.norms, strict=True)
        if setup.clip or setup.zero_stage
    ]
    return worst_error(trained, reference, initial_parameters(setup)), max(norm_errors, default=0.0)


def clipped_steps(setup: Setup) -> tuple[float, dict[int, float]]:
    """The reported norm, and the step of each expert of this rank in each of its weights."""
    toy = Toy(setup)
    moe = toy.moe
    for slot in range(moe.num_local_experts):
        moe.deepspeed_moe.experts.deepspeed_experts[slot] = torch.nn.Linear(HIDDEN, HIDDEN)
    engine = make_engine(setup, toy)
    first = dist.get_rank() % setup.ep_size * moe.num_local_experts
    weights = {first + slot: e.weight for slot, e in enumerate(moe.deepspeed_moe.experts.deepspeed_experts)}
    for parameter in toy.parameters():
        parameter.register_hook(torch.zeros_like)
    for j, weight in weights.items():
        # DeepSpeed sums over the replicas of an expert and divides by the number of ranks.
        weight.register_hook(lambda grad, j=j: torch.full_like(grad, (j + 1) * setup.ep_size))
    before = {j: weight.detach().clone() for j, weight in weights.items()}
    outcome = train(engine, setup)
    return outcome.norms[0], {j: float((before[j] - weight.detach()).mean()) for j, weight in weights.items()}


def trained_gate(setup: Setup) -> Tensor:
    return train(make_engine(setup, Toy(setup)), setup).parameters["moe.deepspeed_moe.gate.wg.weight"]


def initial_gate() -> Tensor:
    return Toy(Setup(), ep_size=1).moe.deepspeed_moe.gate.wg.weight.detach()


def overflowing(setup: Setup) -> Any:
    """An engine in which one expert of rank 1 has an infinite gradient."""
    toy = Toy(setup)
    engine = make_engine(setup, toy)
    if dist.get_rank() == 1:
        expert = toy.moe.deepspeed_moe.experts.deepspeed_experts[0]
        expert[0].weight.register_hook(lambda grad: torch.full_like(grad, torch.inf))
    return engine


def step_with_overflow(setup: Setup) -> tuple[int, bool]:
    engine = overflowing(setup)
    before = logical_parameters(engine.module)
    after = train(engine, setup).parameters
    return engine.skipped_steps, any(not torch.equal(after[name], before[name]) for name in before)


def auxiliary_step_errors(zero_stage: int) -> list[float]:
    """Errors of the gate's step: one micro-batch and two equal ones, and two different ones, on two ranks."""
    base = Setup(zero_stage=zero_stage, num_steps=1, learning_rate=1.0)
    rank = dist.get_rank()
    first, second = (batch(base, 0, rank, micro) for micro in (0, 1))
    errors = []
    for micro_batches in ([first], [first, first], [first, second]):
        engine = make_engine(replace(base, accumulation=len(micro_batches)), Toy(base))
        gate = engine.module.moe.deepspeed_moe.gate.wg.weight
        before = gate.detach().clone()
        for tokens in micro_batches:
            engine.backward(engine(tokens)[1])
            engine.step()
        step = before - gate.detach()
        engine.destroy()

        numbers = [0 if tokens is first else 1 for tokens in micro_batches]
        toy = Toy(base, ep_size=1)
        parts = [reference_forward(toy, batch(base, 0, r, micro))[1] for r in range(2) for micro in numbers]
        torch.stack(parts).mean().backward()
        expected = toy.moe.deepspeed_moe.gate.wg.weight.grad
        assert expected is not None
        errors.append(float((step - expected).abs().max() / expected.abs().max()))
    return errors


def losses_with_and_without_aux() -> tuple[float, float, float]:
    setup = Setup()
    engine = make_engine(setup, Toy(setup))
    result = engine(batch(setup, 0, dist.get_rank(), 0))
    losses = [float(loss_of(replace(setup, aux=aux), result).detach()) for aux in (0.1, 0.0)]
    engine.destroy()
    return losses[0], losses[1], float(result[1].detach())


def trained_bias(checkpointing: Any) -> tuple[Tensor, list[int]]:
    """The bias after one step of two micro-batches, and the load of both ranks that the engine counted."""
    setup = Setup(accumulation=2, checkpointing=checkpointing, options={"bias_update_rate": 0.01})
    engine = make_engine(setup, Toy(setup))
    for micro in range(2):
        engine.backward(loss_of(setup, engine(batch(setup, 0, dist.get_rank(), micro))))
        engine.step()
    (layer,) = engine.moe_stats().layers
    bias = engine.module.moe.deepspeed_moe.gate.correction_bias.clone()
    engine.destroy()
    return bias, list(layer.expert_load)


def bias_after_overflow() -> list[float]:
    setup = Setup(bf16=True, num_steps=1, options={"bias_update_rate": 0.01})
    engine = overflowing(setup)
    train(engine, setup)
    return engine.module.moe.deepspeed_moe.gate.correction_bias.tolist()


def resume(setup: Setup, directory: str) -> tuple[float, str, bool]:
    engine = make_engine(setup, Toy(setup))
    take_steps(engine, setup, 0, 2)
    engine.save_checkpoint(directory, tag="two")
    take_steps(engine, setup, 2, 4)
    expected, expected_bias = logical_parameters(engine.module), engine.module.moe.deepspeed_moe.gate.correction_bias
    engine.destroy()

    torch.manual_seed(99)
    toy = Toy(setup)
    for parameter in toy.parameters():
        torch.nn.init.normal_(parameter)
    engine = make_engine(setup, toy)
    engine.load_checkpoint(directory, tag="two")
    take_steps(engine, setup, 2, 4)
    resumed, bias = logical_parameters(engine.module), engine.module.moe.deepspeed_moe.gate.correction_bias
    engine.destroy()
    error = max(float((resumed[name] - expected[name]).abs().max()) for name in expected)
    return error, str(bias.dtype), bool(expected_bias.any()) and torch.equal(bias, expected_bias)


def take_steps(engine: Any, setup: Setup, first: int, last: int) -> None:
    for step in range(first, last):
        engine.backward(loss_of(setup, engine(batch(setup, step, dist.get_rank(), 0))))
        engine.step()


def message_of_stage_3() -> str:
    setup = Setup(zero_stage=3)
    try:
        make_engine(setup, Toy(setup))
    except ConfigError as error:
        return str(error)
    return "no error"


def stats_of_one_step() -> tuple[str, int, int]:
    setup = Setup()
    engine = make_engine(setup, Toy(setup))
    take_steps(engine, setup, 0, 1)
    (layer,) = engine.moe_stats().layers
    engine.destroy()
    return layer.name, layer.num_tokens, sum(layer.expert_load)


def modes_of_layers() -> tuple[str, str]:
    import ds_hybrid

    modes = []
    for options in ({}, {"dispatch": "alltoall"}):
        setup = Setup(options=options)
        toy = Toy(setup)
        config = {**setup.ds_config(), "ds_hybrid": {"dispatch": {"mode": "allgather"}}}
        engine, *_ = ds_hybrid.initialize(model=toy, model_parameters=toy.parameters(), config=config)
        modes.append(str(toy.moe.dispatcher.mode))
        engine.destroy()
    return modes[0], modes[1]

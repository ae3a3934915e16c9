"""Records from measurements: figures by hand, what is left out, and what monitors get."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_hybrid.dispatch.choose import DispatcherChange
from ds_hybrid.observe.compose import (
    AttentionReport,
    Progress,
    RankReport,
    dispatcher_records,
    longest_placed,
    rebalance_records,
    relative_entropy,
    step_record,
    without_secrets,
)
from ds_hybrid.observe.events import AttentionStep, GainRecord, RebalanceRecord, StepRecord
from ds_hybrid.observe.monitor import change_events, look_events, monitor_events, moved_events
from ds_hybrid.observe.nvlink import GpuUse, NotAvailable
from ds_hybrid.observe.stats import LayerStats, MoEStats
from ds_hybrid.placement import ExpertPlacement
from ds_hybrid.rebalance.look import Gain, Look, Move
from ds_hybrid.rebalance.policy import LayerOutlook
from tests.observe.runs import run_record

PLACEMENT = ExpertPlacement.from_slots([[0, 3], [1, 2]])
STATS = LayerStats(
    name="a",
    mode="two_stage",
    payload=900,
    metadata=100,
    lower_bound=800,
    num_tokens=50,
    expert_load=(40, 30, 20, 10),
    wire_bytes_by_mode={"two_stage": 600, "alltoall": 400},
    arrived=(30, 28),
    exposed_seconds=0.5,
    expert_seconds=(0.3, 0.1),
)
NOTHING = LayerStats("b", "alltoall", 0, 0, 0, 0, (0, 0, 0, 0), {}, (0, 0), 0.0, (0.0, 0.0))


def reports(**changes: Any) -> list[RankReport]:
    fields = {"num_losses": 2, "host_memory": 100, "accelerator_memory": None, "host": "h"}
    return [RankReport(**(fields | {"loss": 3.0} | changes)), RankReport(**(fields | {"loss": 5.0}))]


def record_of(*layers: LayerStats, **changes: Any) -> StepRecord:
    return step_record(
        MoEStats(layers),
        {"a": PLACEMENT, "b": PLACEMENT},
        {"a": 2, "b": 2},
        reports(**changes),
        Progress(step=20, samples=160),
        time=7.0,
        num_steps=10,
        seconds=2.0,
        lr=[0.1, 0.2],
    )


def test_figures_of_a_step_by_hand() -> None:
    record = record_of(STATS, NOTHING)
    assert (record.step, record.samples, record.num_steps, record.lr) == (20, 160, 10, (0.1, 0.2))
    assert record.loss == (3.0 + 5.0) / 4
    assert (record.tokens, record.tokens_per_second) == (50, 25.0)
    assert record.exposed_fraction == 0.5 / (2 * 2.0)
    assert record.load_max_over_mean == 40 / 25
    assert record.wire_bytes_per_token == 1000 / 50
    assert record.lower_bound_ratio == 1000 / 800
    assert (record.host_memory, record.accelerator_memory, record.nvlink) == ((100, 100), None, ())
    assert record.attention is None
    layer, empty = record.layers
    assert (layer.load, layer.load_max_over_mean) == ((40, 30, 20, 10), 1.6)
    shares = (0.4, 0.3, 0.2, 0.1)
    assert layer.load_entropy == pytest.approx(-sum(s * math.log(s) for s in shares) / math.log(4))
    assert (layer.rank_load, layer.rank_load_max_over_mean) == ((50, 50), 1.0)
    assert layer.expert_time_max_over_mean == pytest.approx(1.5)
    assert layer.wire_bytes == {"two_stage": 600, "alltoall": 400}
    assert (layer.lower_bound_ratio, layer.exposed_seconds, layer.arrived) == (1.25, 0.5, (30, 28))
    assert (empty.load_max_over_mean, empty.load_entropy, empty.lower_bound_ratio) == (None, None, None)
    assert (empty.rank_load_max_over_mean, empty.expert_time_max_over_mean) == (None, None)


def test_a_model_without_moe_layers_and_a_run_without_backward() -> None:
    record = step_record(
        MoEStats(()),
        {},
        {},
        [RankReport(0.0, 0, 1, None, "h")],
        Progress(1, 1),
        time=0.0,
        num_steps=1,
        seconds=0.0,
        lr=(),
    )
    assert (record.loss, record.tokens, record.tokens_per_second, record.lower_bound_ratio) == (None, 0, None, None)
    assert [name for name, *_ in monitor_events(record)] == ["Train/Samples/host_memory_max"]


def test_entropy_is_1_when_even_and_0_when_one_has_all() -> None:
    assert relative_entropy((5, 5, 5)) == pytest.approx(1.0)
    assert relative_entropy((0, 9, 0)) == 0.0
    assert relative_entropy((0, 0)) is None
    assert relative_entropy((3,)) is None


def test_accelerators_and_nvlinks_where_there_are_some() -> None:
    use = {0: GpuUse("NVML", 1.0, 10.0, 20.0, 40.0), 1: NotAvailable("it has no NVLink")}
    record = record_of(STATS, accelerator_memory=7, nvlink=use)
    assert record.accelerator_memory == (7,)
    first, second = record.nvlink
    assert (first.host, first.gpu, first.sent, first.received, first.fraction) == ("h", 0, 10.0, 20.0, 0.5)
    assert (second.gpu, second.sent, second.reason) == (1, None, "it has no NVLink")
    assert {n: v for n, v, _ in monitor_events(record)}["Train/Samples/nvlink_fraction_max"] == 0.5
    assert record_of(STATS, nvlink=NotAvailable("no driver")).nvlink == ()


def test_attention_that_ranks_share_is_summed_over_them() -> None:
    record = record_of(STATS, attention=AttentionReport(wire_bytes=300, exposed_seconds=0.5))
    assert record.attention == AttentionStep(wire_bytes=300, exposed_seconds=0.5, exposed_fraction=0.25)
    values = {name: value for name, value, _ in monitor_events(record)}
    assert values["Train/Samples/attention_wire_bytes"] == 300
    assert values["Train/Samples/attention_exposed_fraction"] == 0.25


def test_experts_are_where_they_were_in_most_of_the_steps() -> None:
    other, third = ExpertPlacement.from_slots([[0, 1], [2, 3]]), ExpertPlacement.from_slots([[3, 1], [2, 0]])
    assert longest_placed([(10, PLACEMENT)], 20) == PLACEMENT
    assert longest_placed([(10, PLACEMENT), (20, other)], 20) == PLACEMENT  # moved after the last step
    assert longest_placed([(0, PLACEMENT), (0, other)], 10) == other  # before the first one
    assert longest_placed([(10, PLACEMENT), (13, other), (18, third)], 20) == other
    assert longest_placed([(10, PLACEMENT), (15, other)], 20) == PLACEMENT


def test_monitors_get_names_in_deepspeeds_style_over_samples() -> None:
    events = {name: (value, samples) for name, value, samples in monitor_events(record_of(STATS, NOTHING))}
    assert {samples for _, samples in events.values()} == {160}
    values = {name.removeprefix("Train/Samples/"): value for name, (value, _) in events.items()}
    assert values["train_loss"] == 2.0
    assert values["moe_load_max_over_mean"] == values["moe_load_max_over_mean/a"] == 1.6
    assert values["moe_expert_time_max_over_mean"] == pytest.approx(1.5)
    assert (values["moe_wire_bytes_two_stage"], values["moe_wire_bytes_alltoall"]) == (600.0, 400.0)
    assert (values["moe_lower_bound_ratio"], values["tokens_per_second"]) == (1.25, 25.0)
    assert "moe_load_max_over_mean/b" not in values  # nothing was routed
    assert all(isinstance(value, float) for value in values.values())


def test_secrets_of_a_ds_config_stay_out() -> None:
    document = {"comet": {"enabled": True, "api_key": "abc"}, "list": [{"token": "x"}], "wandb": {"api_key": None}}
    assert without_secrets(document) == {
        "comet": {"enabled": True, "api_key": "(left out)"},
        "list": [{"token": "(left out)"}],
        "wandb": {"api_key": None},
    }
    secrets = ["hf_token", "wandb_api_key", "aws_secret_access_key", "WANDB_API_KEY", "apiKey", "db-password", "apikey"]
    secrets += [
        "auth",
        "db_pwd",
        "passphrase",
        "slackWebhook",
        "webhook_url",
        "Authorization",
        "token_",
        "passwords",
        "aws_credentials",
    ]
    harmless = ["tokenizer", "max_tokens", "keys", "monkey", "secretary", "tokens_per_second", "author"]
    harmless += ["pad_token_id", "key_size", "num_key_value_heads", "tokenType"]
    document = dict.fromkeys([*secrets, *harmless], "x")
    assert {key for key, value in without_secrets(document).items() if value != "x"} == set(secrets)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://me:pass@host:8080/runs?of=a@b", "https://(left out)@host:8080/runs?of=a@b"),
        ("https://me:p@ss@host", "https://(left out)@host"),
        ("git+ssh://hf_abc@host/a", "git+ssh://(left out)@host/a"),
        ("to tcp://a:b@one, tcp://c:d@two", "to tcp://(left out)@one, tcp://(left out)@two"),
        ("https://host/a@b", "https://host/a@b"),
        ("me@host", "me@host"),
    ],
)
def test_passwords_in_urls_stay_out(url: str, shown: str) -> None:
    assert without_secrets({"at": [url]}) == {"at": [shown]}


def test_a_ds_config_with_what_json_lacks_is_written_in_words() -> None:
    document = {"dtype": torch.bfloat16, "at": [Path("/a"), (1, 2.5)], 3: {"nan": math.nan, "none": None, "flag": True}}
    record = run_record(ds_config=without_secrets(document))
    assert json.loads(record.to_line())["ds_config"] == {
        "dtype": "torch.bfloat16",
        "at": ["/a", [1, 2.5]],
        "3": {"nan": "NaN", "none": None, "flag": True},
    }


OUTLOOK = LayerOutlook(1.6, 1.1, 1.0, 3, 1.2, 4, 1, 2, 0.004, 0.002, True, "earned back in 1 steps")


def test_a_look_becomes_the_gains_of_earlier_moves_and_a_decision() -> None:
    look = Look("moved", "moved 4", {"a": OUTLOOK}, (Gain("a", 10, 0.005, -0.001),), Move(("a",), 4, 0.25, 0.002, 4096))
    gain, decision = rebalance_records(look, {"a": PLACEMENT, "b": PLACEMENT}, time=1.0, step=20)
    assert isinstance(gain, GainRecord)
    assert (gain.layer, gain.moved_at, gain.predicted, gain.measured, gain.step) == ("a", 10, 0.005, -0.001, 20)
    assert isinstance(decision, RebalanceRecord)
    assert (decision.action, decision.num_moved, decision.seconds, decision.bytes_sent) == ("moved", 4, 0.25, 4096)
    assert decision.placements == {"a": ((0, 3), (1, 2))}
    (of_layer,) = decision.decisions
    assert (of_layer.load_before, of_layer.load_after, of_layer.load_bound) == (1.6, 1.1, 1.0)
    assert (of_layer.hottest_expert, of_layer.hottest_load, of_layer.num_moved_across) == (3, 1.2, 1)
    assert (of_layer.predicted_gain, of_layer.predicted_cost, of_layer.pays) == (0.004, 0.002, True)


def test_monitors_see_moves_and_what_they_bring() -> None:
    outlooks = {"a": OUTLOOK, "b": replace(OUTLOOK, gain_seconds_per_step=0.5), "c": replace(OUTLOOK, pays=False)}
    gains = (Gain("a", 10, 0.005, -0.001), Gain("b", 10, 0.002, 0.004))
    moved = Look("moved", "", outlooks, gains, Move(("a", "b"), 4, 0.25, 0.002, 4096))
    assert look_events(moved, 160) == [
        ("Train/Samples/moe_experts_moved", 4.0, 160),
        ("Train/Samples/moe_rebalance_predicted_gain", pytest.approx(0.504), 160),
        ("Train/Samples/moe_rebalance_measured_gain", pytest.approx(0.003), 160),
    ]
    dry = look_events(replace(moved, outcome="dry_run", gains=(), move=None), 160)
    assert dry == [("Train/Samples/moe_rebalance_predicted_gain", pytest.approx(0.504), 160)]
    assert look_events(replace(moved, outcome="too_costly", gains=(), move=None), 160) == []
    assert look_events(Look("stays", "nothing moves"), 160) == []
    assert moved_events(3, 8) == [("Train/Samples/moe_experts_moved", 3.0, 8)]


def test_monitors_count_changes_of_dispatchers() -> None:
    change = DispatcherChange("a", "two_stage", "allgather", {"two_stage": 0.003, "allgather": 0.002})
    assert change_events([change, change], 8) == [("Train/Samples/moe_dispatcher_changes", 2.0, 8)]
    assert change_events([], 8) == []


def test_a_look_without_moves_names_no_placements() -> None:
    (decision,) = rebalance_records(Look("stays", "nothing moves"), {"a": PLACEMENT}, time=1.0, step=20)
    assert isinstance(decision, RebalanceRecord)
    assert (decision.action, decision.num_moved, decision.seconds, decision.placements) == ("stays", 0, None, {})


def test_a_change_of_dispatchers_tells_why() -> None:
    change = DispatcherChange("a", "two_stage", "allgather", {"two_stage": 0.003, "allgather": 0.002})
    (record,) = dispatcher_records([change], time=1.0, step=1)
    assert record.model_dump(include={"layer", "before", "after", "reason"}) == {
        "layer": "a",
        "before": "two_stage",
        "after": "allgather",
        "reason": "predicted ms of a forward and backward: two_stage 3.000, allgather 2.000",
    }

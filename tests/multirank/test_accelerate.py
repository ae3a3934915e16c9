"""Plain Accelerate on two ranks with two expert-parallel places, through ds_hybrid: loops as users write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import ds_hybrid
from ds_hybrid.engine import whole_weights
from ds_hybrid.engine.engine import MoEEngine
from ds_hybrid.errors import ConfigError
from ds_hybrid.hf.trainer import engine_of
from tests.multirank.models import VOCABULARY, make_model
from tests.multirank.trainers import LAYERS, LORA, forget_accelerate, logits_of, sequences
from tests.ranks import RankPool

NUM_STEPS = 4
NEW_TOKENS = 4


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_the_scripts_optimizer_and_scheduler(two_ranks: RankPool, zero_stage: int) -> None:
    """Both are torch's, made before ``prepare``, as in Accelerate's own examples; each group has its rate."""
    rates, expected = rates_and_weights_of_one_process()
    outcomes = two_ranks.run(train_by_the_scripts_schedule, zero_stage)
    assert rates[0] != rates[1]
    assert [rate for rate, _ in rates[:2]] == pytest.approx([0.01 * 2 / 3, 0.01 * 5 / 6])  # warmed up, then halfway
    for trained in outcomes:
        np.testing.assert_allclose(trained.rates, rates)
        # Dense weights of both groups, then their experts.
        np.testing.assert_allclose(trained.rates_of_groups, [[*of_step, *of_step] for of_step in rates])
    assert outcomes[0].weights.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(outcomes[0].weights[name], weight, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_loop_saved_after_the_block(two_ranks: RankPool, tmp_path: Path, zero_stage: int) -> None:
    """The switch is off when weights are asked for: they are all experts' all the same."""
    from transformers import AutoModelForCausalLM

    first, second = two_ranks.run(loop_of_accelerate, zero_stage, str(tmp_path))
    assert first.losses == second.losses
    assert first.after_loading == first.losses[2:]
    assert first.names == sorted(make_model("mixtral").state_dict())
    assert second.names == []
    for folder in ("model", "by_accelerate"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder, attn_implementation="eager")
        torch.testing.assert_close(logits_of(model), first.logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("ep_size", [1, 2])
def test_the_bare_model_is_refused_on_every_rank(two_ranks: RankPool, ep_size: int) -> None:
    for message in two_ranks.run(ask_the_bare_model, ep_size):
        assert message.startswith(
            f"get_state_dict(MixtralForCausalLM): the bare model has 1/{ep_size} of the experts of {LAYERS[0]} on this"
        )


def test_a_scheduler_in_another_call_is_refused(two_ranks: RankPool) -> None:
    for message in two_ranks.run(prepare_without_the_scheduler):
        assert message.startswith("accelerator.prepare: the optimizer has a torch scheduler that is not among")


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("kind", ["module", "subclass"])
def test_models_of_ones_own_class_have_their_names_again(two_ranks: RankPool, kind: str, zero_stage: int) -> None:
    """They cannot be made anew from their config, which is all that saving had to go by."""
    expected = make_own(kind).state_dict()
    first, second = two_ranks.run(weights_of_own, kind, zero_stage)
    assert second == {}
    assert first.keys() == expected.keys()
    assert all(torch.equal(first[name], value) for name, value in expected.items())


def test_a_fault_in_gathering_is_no_value_error(two_ranks: RankPool) -> None:
    """The Trainer takes that for weights that are not gathered at ZeRO 3; it asks in two ways."""
    for faults in two_ranks.run(gather_with_a_fault):
        assert faults == ["RuntimeError: no such layer"] * 2


def test_adapters_with_new_tokens_and_a_second_adapter(two_ranks: RankPool, tmp_path: Path) -> None:
    """What PEFT picks from the state dict is more than what trains."""
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    make_model("mixtral").save_pretrained(base)  # type: ignore[operator]
    first, second = two_ranks.run(train_adapters, str(base), str(tmp_path))
    assert second.weights == {}
    assert first.weights.keys() == first.initial.keys()
    changed = {name for name, value in first.weights.items() if not torch.equal(value, first.initial[name])}
    assert changed
    assert all("lora_" in name and ".default." in name for name in changed)

    assert first.names == first.trained  # whole blocks of experts
    saved = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert saved["base_model.model.model.embed_tokens.weight"].shape[0] == VOCABULARY + NEW_TOKENS
    other = load_file(tmp_path / "adapters" / "other" / "adapter_model.safetensors")
    in_other = {name.replace(".other.", "."): name for name in first.initial if ".other." in name}
    assert in_other.keys() <= other.keys()
    assert all(torch.equal(other[name], first.initial[ours]) for name, ours in in_other.items())

    plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    torch.manual_seed(7)  # other new rows than the run's
    plain.resize_token_embeddings(VOCABULARY + NEW_TOKENS)
    model = PeftModel.from_pretrained(plain, tmp_path / "adapters")
    torch.testing.assert_close(logits_of_new_tokens(model), first.logits, rtol=0, atol=1e-5)


def test_an_accelerator_that_was_refused_can_be_used(two_ranks: RankPool) -> None:
    for message, num_models in two_ranks.run(prepare_twice):
        assert message.startswith(
            "even_batches = False: ranks could get different numbers of batches, and with experts on 2"
        )
        assert num_models == 1


def test_switched_off_it_is_deepspeeds_engine_again(two_ranks: RankPool) -> None:
    assert two_ranks.run(engines_on_and_off) == [[MoEEngine, deepspeed.DeepSpeedEngine]] * 2


def ds_config(zero_stage: int, **sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": zero_stage, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_force_ds_cpu_optimizer": False,
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        "ds_hybrid": {"dispatch": {"mode": "two_stage"}},
        **sections,
    }


def make_accelerator(config: dict[str, Any], *, moe_blocks: str | None = None, **options: Any) -> Any:
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    forget_accelerate()
    PartialState(cpu=True)  # on CPUs: alone, Accelerate would take each rank for a run of its own
    plugin = DeepSpeedPlugin(hf_ds_config=config, transformer_moe_cls_names=moe_blocks)
    return Accelerator(deepspeed_plugin=plugin, **options)


def loader() -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(sequences(4 * NUM_STEPS), batch_size=2)  # type: ignore[arg-type]


def optimizer_and_scheduler(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """Two groups with experts in both, each with its own rate and decay."""
    from transformers import get_linear_schedule_with_warmup

    first, second = [], []
    for name, parameter in model.named_parameters():
        (first if "layers.0." in name else second).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": first, "lr": 0.01, "weight_decay": 0.1}, {"params": second, "lr": 0.002, "weight_decay": 0.0}]
    )
    # Accelerate steps it once for each rank.
    return optimizer, get_linear_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=9)


def rates_and_weights_of_one_process() -> tuple[list[list[float]], Mapping[str, Tensor]]:
    """Of the plain model on the batches of both ranks: each group's rate after each step; the weights at the end."""
    model: Any = make_model("mixtral")
    optimizer, scheduler = optimizer_and_scheduler(model)
    rows = sequences(4 * NUM_STEPS)
    rates = []
    for start in range(0, len(rows), 4):
        batch = {name: torch.stack([row[name] for row in rows[start : start + 4]]) for name in rows[0]}
        model(**batch).loss.backward()
        optimizer.step()
        for _ in range(2):
            scheduler.step()
        optimizer.zero_grad()
        rates.append([group["lr"] for group in optimizer.param_groups])
    return rates, model.state_dict()


@dataclass(frozen=True)
class ByTheScript:
    """Rates after each step: as the script's scheduler says them, and of the engine's groups."""

    rates: list[list[float]]
    rates_of_groups: list[list[float]]
    weights: dict[str, Tensor]


def train_by_the_scripts_schedule(zero_stage: int) -> ByTheScript:
    model = make_model("mixtral")
    optimizer, scheduler = optimizer_and_scheduler(model)
    rates, rates_of_groups = [], []
    with ds_hybrid.use_with_accelerate():
        accelerator = make_accelerator(ds_config(zero_stage, gradient_clipping=0.0))
        engine, optimizer, batches, scheduler = accelerator.prepare(model, optimizer, loader(), scheduler)
        for batch in batches:
            accelerator.backward(engine(**batch).loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(scheduler.get_last_lr()[:2])
            rates_of_groups.append([group["lr"] for group in engine.optimizer.param_groups])
        weights = accelerator.get_state_dict(engine)
    engine.destroy()
    return ByTheScript(rates, rates_of_groups, weights)


@dataclass(frozen=True)
class Loop:
    losses: list[float]
    after_loading: list[float]
    names: list[str]
    logits: Tensor


def loop_of_accelerate(zero_stage: int, folder: str) -> Loop:
    """4 steps; then 2 of them again, from the state in between."""
    from accelerate.utils import DummyOptim

    optimizer_section = {"type": "AdamW", "params": {"torch_adam": True, "lr": "auto", "weight_decay": "auto"}}
    with ds_hybrid.use_with_accelerate():
        accelerator = make_accelerator(
            ds_config(zero_stage, optimizer=optimizer_section), moe_blocks="MixtralSparseMoeBlock"
        )
        model = make_model("mixtral")
        engine, optimizer, batches = accelerator.prepare(model, DummyOptim(list(model.parameters()), lr=0.01), loader())
        assert engine_of(accelerator) is engine

        def step(batch: dict[str, Tensor]) -> float:
            loss = engine(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return float(accelerator.gather(loss.detach()).mean())

        batches = list(batches)
        losses = [step(batch) for batch in batches[:2]]
        accelerator.save_state(f"{folder}/state")
        losses += [step(batch) for batch in batches[2:]]
        accelerator.load_state(f"{folder}/state")
        again = [step(batch) for batch in batches[2:]]
    state = accelerator.get_state_dict(engine)
    names = sorted(state)
    accelerator.unwrap_model(engine).save_pretrained(
        f"{folder}/model", is_main_process=accelerator.is_main_process, state_dict=state
    )
    accelerator.save_model(engine, f"{folder}/by_accelerate")
    if accelerator.is_main_process:
        model.config.save_pretrained(f"{folder}/by_accelerate")  # type: ignore[operator, union-attr]
    logits = logits_of(engine)
    engine.destroy()
    dist.barrier()
    return Loop(losses, again, names, logits)


def ask_the_bare_model(ep_size: int) -> str:
    config = ds_config(0)
    config["expert_parallel"]["autoep_size"] = ep_size
    with ds_hybrid.use_with_accelerate():
        accelerator = make_accelerator(config)
        engine = accelerator.prepare(make_model("mixtral"))
    with pytest.raises(ConfigError) as caught:
        accelerator.get_state_dict(accelerator.unwrap_model(engine))
    engine.destroy()
    return str(caught.value)


def prepare_without_the_scheduler() -> str:
    """It is the script's, and was to be prepared by itself."""
    model = make_model("mixtral")
    optimizer, _scheduler = optimizer_and_scheduler(model)
    with ds_hybrid.use_with_accelerate():
        accelerator = make_accelerator(ds_config(1))
        with pytest.raises(ConfigError) as caught:
            accelerator.prepare(model, optimizer)
    return str(caught.value)


class OwnModule(nn.Module):
    """A Hugging Face model's body under a head of one's own."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.config = body.config
        self.model = body.model
        self.head = body.lm_head


class OwnSubclass(MixtralForCausalLM):
    def __init__(self, config: MixtralConfig, tokenizer: str) -> None:
        super().__init__(config)
        self.tokenizer = tokenizer


def make_own(kind: str) -> nn.Module:
    model: Any = make_model("mixtral")
    if kind == "module":
        return OwnModule(model)
    own = OwnSubclass(model.config, "of bytes")
    own.load_state_dict(model.state_dict())
    return own


def weights_of_own(kind: str, zero_stage: int) -> dict[str, Tensor]:
    from accelerate.utils import DummyOptim

    optimizer_section = {"type": "AdamW", "params": {"torch_adam": True, "lr": 0.01}}
    forget_accelerate()  # a previous run's ZeRO 3 would part the model's weights
    model = make_own(kind)
    with ds_hybrid.use_with_accelerate():
        accelerator = make_accelerator(ds_config(zero_stage, optimizer=optimizer_section))
        engine, _ = accelerator.prepare(model, DummyOptim(list(model.parameters())))
    assert len(engine.moe_layers_by_name()) == 2
    weights: dict[str, Tensor] = accelerator.get_state_dict(engine)
    engine.destroy()
    return weights


def gather_with_a_fault() -> list[str]:
    def fail(model: nn.Module) -> None:
        raise ValueError("no such layer")

    with ds_hybrid.use_with_accelerate():
        accelerator = make_accelerator(ds_config(0))
        engine = accelerator.prepare(make_model("mixtral"))
    faults = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_weights, "_experts_of_layers", fail)
        for ask in (lambda: accelerator.get_state_dict(engine), engine._zero3_consolidated_16bit_state_dict):
            try:
                ask()
            except (RuntimeError, ValueError) as error:
                faults.append(f"{type(error).__name__}: {error}")
    engine.destroy()
    return faults


@dataclass(frozen=True)
class Adapted:
    """Names are those of what trains once a weight of experts does too; ``trained``: what they must be."""

    initial: dict[str, Tensor]
    weights: dict[str, Tensor]
    names: set[str]
    trained: set[str]
    logits: Tensor


def train_adapters(base: str, folder: str) -> Adapted:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    torch.manual_seed(0)
    model.resize_token_embeddings(VOCABULARY + NEW_TOKENS)
    adapted: Any = get_peft_model(model, LoraConfig(**LORA))
    adapted.add_adapter("other", LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
    initial = {name: value.clone() for name, value in adapted.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.01)
    with ds_hybrid.use_with_accelerate():
        accelerator = make_accelerator(ds_config(1))
        engine, optimizer, batches = accelerator.prepare(adapted, optimizer, loader())
        for batch in with_new_tokens(batches):
            accelerator.backward(engine(**batch).loss)
            optimizer.step()
        weights = accelerator.get_state_dict(engine)
        accelerator.unwrap_model(engine).save_pretrained(
            f"{folder}/adapters", is_main_process=accelerator.is_main_process, state_dict=weights
        )
    trained = {name for name in initial if "lora_" in name and ".default." in name}
    trained |= {name for name in initial if ".layers.0.mlp.experts." in name}
    engine.moe_layers_by_name()[f"base_model.model.{LAYERS[0]}"].experts.w2.requires_grad_(True)
    names = set(engine.whole_state_dict(exclude_frozen_parameters=True))
    logits = logits_of_new_tokens(engine)
    engine.destroy()
    dist.barrier()
    return Adapted(initial, weights, names, trained, logits)


def with_new_tokens(batches: Any) -> Iterator[dict[str, Tensor]]:
    for batch in batches:
        yield {**batch, "input_ids": torch.where(batch["input_ids"] < NEW_TOKENS, VOCABULARY, batch["input_ids"])}


def logits_of_new_tokens(model: Any) -> Tensor:
    ids = torch.arange(VOCABULARY - 4, VOCABULARY + NEW_TOKENS)[None]
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids).logits.float()
    return logits


def prepare_twice() -> tuple[str, int]:
    from accelerate.utils import DataLoaderConfiguration

    with ds_hybrid.use_with_accelerate():
        accelerator = make_accelerator(ds_config(0), dataloader_config=DataLoaderConfiguration(even_batches=False))
        model = make_model("mixtral")
        with pytest.raises(ConfigError) as caught:
            accelerator.prepare(model)
        accelerator.even_batches = True
        engine = accelerator.prepare(model)
        assert engine_of(accelerator) is engine
    engine.destroy()
    return str(caught.value), len(accelerator._models)


def engines_on_and_off() -> list[type]:
    kinds = []
    switch = ds_hybrid.use_with_accelerate()
    for _ in range(2):
        accelerator = make_accelerator({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}})
        engine = accelerator.prepare(nn.Linear(2, 2))
        kinds.append(type(engine))
        engine.destroy()
        switch.off()
    return kinds

"""launch/train_hf.py as a user starts it: trains, stops, resumes and saves, under each launcher."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import MixtralConfig

from tests.launch.test_train import BIN, ROOT, free_port, started

pytestmark = pytest.mark.launch

OPTIONS = [
    *("--deepspeed", str(ROOT / "ds_configs" / "trainer_auto.json"), "--use_cpu", "--report_to", "none"),
    *("--seq_len", "64", "--eval_sequences", "9", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3"),
    *("--logging_steps", "1", "--eval_strategy", "steps", "--eval_steps", "4", "--save_steps", "4"),
    *("--lr_scheduler_type", "constant", "--gradient_accumulation_steps", "2", "--disable_tqdm", "1"),
    *("--data_seed", "3"),
]
LAUNCHERS = {
    "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port"],
    "torchrun": ["torchrun", "--nproc_per_node", "2", "--master_port"],
    "accelerate": [
        *("accelerate", "launch", "--use_deepspeed", "--num_machines", "1", "--num_processes", "2"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port"),
    ],
}
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@dataclass(frozen=True)
class Ended:
    """A run, what it printed, and the logs of the Trainer's last checkpoint."""

    folder: Path
    output: str
    logs: list[dict[str, float]]

    def values(self, name: str) -> list[float]:
        return [entry[name] for entry in self.logs if name in entry]


def run(launcher: str, folder: Path, *options: str) -> Ended:
    script = [str(ROOT / "launch" / "train_hf.py"), "--output_dir", str(folder / "run"), *OPTIONS, *options]
    name, *launcher_options = LAUNCHERS[launcher]
    command = [str(BIN / name), *launcher_options, str(free_port()), *script]
    with started(command, folder / "output") as process:
        process.wait(timeout=180)
    output = (folder / "output").read_text()
    assert process.returncode == 0, output
    states = sorted(folder.glob("run/checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    return Ended(folder / "run", output, json.loads(states[-1].read_text())["log_history"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    return run("deepspeed", tmp_path_factory.mktemp("whole"), "--max_steps", "8")


def test_it_trains(whole: Ended) -> None:
    losses, held_out = whole.values("loss"), whole.values("eval_loss")
    assert len(losses) == 8
    assert losses[0] > math.log(256) - 0.5  # of guessing bytes
    assert held_out[1] < held_out[0] < losses[0]
    assert {entry["step"] for entry in whole.logs if "moe_load_max_over_mean" in entry} == set(range(1, 9))
    assert "eval_loss" in whole.output
    assert {"config.json", "model.safetensors"} <= {path.name for path in whole.folder.iterdir()}


def test_it_goes_on_from_a_checkpoint_under_accelerate_launch(whole: Ended, tmp_path: Path) -> None:
    """In a folder of its own; the seed is that of other weights, which the checkpoint replaces."""
    options = ("--max_steps", "8", "--seed", "7", "--resume_from_checkpoint", str(whole.folder / "checkpoint-4"))
    resumed = run("accelerate", tmp_path, *options)
    assert not (resumed.folder / "checkpoint-4").exists()
    assert resumed.values("loss") == whole.values("loss")
    assert resumed.values("eval_loss") == whole.values("eval_loss")
    weights = load_file(resumed.folder / "model.safetensors")
    for name, weight in load_file(whole.folder / "model.safetensors").items():
        assert torch.equal(weights[name], weight), name


def test_adapters_of_a_model_by_its_config_under_torchrun(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    config.save_pretrained(tmp_path)
    options = ("--model", str(tmp_path / "config.json"), "--lora", "--learning_rate", "0.01", "--max_steps", "4")
    trained = run("torchrun", tmp_path, *options)
    assert trained.values("loss")[0] == pytest.approx(math.log(256), abs=0.1)
    assert trained.values("eval_loss")[0] < trained.values("loss")[0] - 0.1
    adapters = load_file(trained.folder / "adapter_model.safetensors")
    assert len(adapters) == 2 * 4 * 2  # layers, projections, A and B
    for name, weight in adapters.items():
        assert ".self_attn." in name
        assert weight.any(), f"{name} has not trained: B begins at zero"


def test_what_a_user_can_put_right_is_one_message(tmp_path: Path) -> None:
    script = [str(ROOT / "launch" / "train_hf.py"), "--output_dir", str(tmp_path / "run"), *OPTIONS]
    command = [sys.executable, *script, "--seq_len", "99999999"]
    with started(command, tmp_path / "output", **ALONE) as process:
        process.wait(timeout=180)
    output = (tmp_path / "output").read_text()
    assert process.returncode == 2, output
    assert "launch/train_hf.py: --model tiny_qwen3_moe: max_position_embeddings = 4096" in output
    assert "Traceback" not in output

"""launch/train_hf.py as a user starts it: trains, stops, resumes and saves."""

import json
import math
from pathlib import Path

import pytest

from tests.launch.test_train import BIN, ROOT, free_port, started

pytestmark = pytest.mark.launch

OPTIONS = [
    *("--deepspeed", str(ROOT / "ds_configs" / "trainer_auto.json"), "--use_cpu", "--report_to", "none"),
    *("--seq_len", "64", "--eval_sequences", "9", "--per_device_train_batch_size", "2", "--learning_rate", "1e-3"),
    *("--logging_steps", "1", "--eval_strategy", "steps", "--eval_steps", "4", "--save_steps", "4"),
    *("--lr_scheduler_type", "constant", "--gradient_accumulation_steps", "2", "--disable_tqdm", "1"),
]


def run(folder: Path, *options: str, code: int = 0) -> tuple[list[dict[str, float]], str]:
    """The Trainer's log, and all that was printed."""
    script = [str(ROOT / "launch" / "train_hf.py"), "--output_dir", str(folder / "run"), *OPTIONS, *options]
    launcher = [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port())]
    with started([*launcher, *script], folder / "output") as process:
        process.wait(timeout=180)
    output = (folder / "output").read_text()
    assert (process.returncode == 0) == (code == 0), output
    states = sorted(folder.glob("run/checkpoint-*/trainer_state.json"), key=lambda path: path.stat().st_mtime)
    return (json.loads(states[-1].read_text())["log_history"] if states else []), output


def test_it_trains_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    whole, output = run(tmp_path, "--max_steps", "8")
    losses = [entry["loss"] for entry in whole if "loss" in entry]
    held_out = [entry["eval_loss"] for entry in whole if "eval_loss" in entry]
    assert len(losses) == 8
    assert losses[0] > math.log(256) - 0.5  # of guessing bytes
    assert held_out[1] < held_out[0] < losses[0]
    assert {entry["step"] for entry in whole if "moe_load_max_over_mean" in entry} == set(range(1, 9))
    assert "eval_loss" in output
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "run").iterdir()}
    resumed, _ = run(tmp_path, "--max_steps", "8", "--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-4"))
    assert [entry["loss"] for entry in resumed if "loss" in entry] == losses


def test_what_a_user_can_put_right_is_one_message(tmp_path: Path) -> None:
    _, output = run(tmp_path, "--max_steps", "1", "--seq_len", "99999999", code=2)
    assert "launch/train_hf.py: --model tiny_qwen3_moe: max_position_embeddings = 4096" in output
    assert "Traceback" not in output.partition("launch/train_hf.py: ")[0]

"""The scripts of docs/getting_started.md, run as the page says."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import MixtralForCausalLM

pytestmark = pytest.mark.launch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "getting_started.md").read_text()
BIN = Path(sys.executable).parent
TIME_LIMIT = 240


def block(language: str, file: str) -> str:
    """The block after the first mention of a file."""
    found = re.search(rf"`{re.escape(file)}`.*?```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, file
    return found[1]


def run(folder: Path, name: str) -> str:
    """What the commands under a script's heading print, with the script and its ds_config in ``folder``."""
    for language, suffix in (("python", "py"), ("json", "json")):
        (folder / f"{name}.{suffix}").write_text(block(language, f"{name}.{suffix}"))
    (folder / "launch").symlink_to(ROOT / "launch")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "VENV": str(BIN.parent),
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(ROOT / ".torch_ext")),
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "MASTER_PORT": str(port),
        "TIME_LIMIT": str(TIME_LIMIT),
    }
    (commands,) = re.findall(rf"```bash\n([^`]*run_local\.sh 2 {name}\.py.*?)```", PAGE, re.DOTALL)
    done = subprocess.run(
        ["bash", "-ec", commands], cwd=folder, env=environment, capture_output=True, text=True, timeout=2 * TIME_LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", output)]


def test_explicit_layers(tmp_path: Path) -> None:
    output = run(tmp_path, "own")
    assert len(losses(output)) == 3
    assert losses(output)[-1] < losses(output)[0] < 5.545  # a byte by chance costs ln 256
    (ratio,) = re.findall(r"([0-9.]+) x the lower bound", output)
    assert 1.0 <= float(ratio) < 1.1


def test_a_hugging_face_model(tmp_path: Path) -> None:
    output = run(tmp_path, "hf")
    assert len(losses(output)) == 3
    assert losses(output)[-1] < losses(output)[0] < 5.545
    model = MixtralForCausalLM.from_pretrained(tmp_path / "exported")
    tokens = torch.tensor([list((tmp_path / "hf.py").read_bytes()[:64])])
    with torch.no_grad():
        loss = model(input_ids=tokens, labels=tokens).loss.item()
    assert loss < 4.5

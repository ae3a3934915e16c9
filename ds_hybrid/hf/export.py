"""A checkpoint as safetensors: a Hugging Face model, or by the module's own names where there is no such model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ds_hybrid.errors import CheckpointError
from ds_hybrid.hf.files import find_files
from ds_hybrid.hf.pretrained import save_pretrained, save_tokenizer
from ds_hybrid.hf.whole_model import SavedModel

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By the names that the command line has for them."""


def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    tag: str | None = None,
    config: str | Path | None = None,
    tokenizer: str | Path | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
) -> None:
    """Write a checkpoint's model to a folder, all experts in logical order. Offline, in one process.

    Args:
        checkpoint, tag: see :func:`ds_hybrid.hf.whole_model.whole_state_dict`.
        out: a new or an empty folder.
        config: the Hugging Face model's ``config.json``, or its folder; None to look for one in the checkpoint. Without
            one, a model of explicit layers is written by its module's own names.
        tokenizer: a folder whose tokenizer goes with the model.
        dtype: of the weights. What the Hugging Face model keeps in float32, and correction biases, stay so.
        max_shard_size: of one safetensors file, such as "5GB".

    Raises:
        CheckpointError: something is missing or does not fit.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: exists, and is not an empty folder. Name a new one.")
    if tokenizer is not None and not Path(tokenizer).is_dir():
        raise CheckpointError(f"{tokenizer}: no such folder. Name the one that holds the tokenizer's files.")
    saved = SavedModel(find_files(checkpoint, tag))
    path = _find_config(saved, Path(checkpoint), config)
    if path is None:
        _save_by_own_names(saved.state_dict(dtype), out, dtype, max_shard_size)
    else:
        save_pretrained(saved, path, out, dtype=dtype, max_shard_size=max_shard_size)
    if tokenizer is not None:
        save_tokenizer(Path(tokenizer), out)


def _find_config(saved: SavedModel, checkpoint: Path, config: str | Path | None) -> Path | None:
    if config is not None:
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file. --config takes a Hugging Face model's config.json or folder.")
        return path
    for folder in (saved.files.folder, checkpoint):
        if (folder / "config.json").is_file():
            return folder / "config.json"
    if any(layer.is_converted for layer in saved.layers):
        raise CheckpointError(
            f"{checkpoint / 'config.json'}: no such file, and the names of the experts depend on the model. Give "
            "--config, the config.json of the model that was trained or the folder it is in."
        )
    return None


def _save_by_own_names(state: dict[str, Tensor], out: Path, dtype: torch.dtype, max_shard_size: str) -> None:
    from huggingface_hub import save_torch_state_dict

    written: set[int] = set()
    for name, value in state.items():
        if value.is_floating_point() and not name.endswith("correction_bias"):
            state[name] = value.to(dtype)
        if state[name].data_ptr() in written:  # tied: safetensors does not keep two names of one tensor
            state[name] = state[name].clone()
        written.add(state[name].data_ptr())
    out.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(state, out, max_shard_size=max_shard_size)

"""A checkpoint's values in the Hugging Face model that was trained, saved as transformers saves it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hybrid.errors import CheckpointError
from ds_hybrid.hf.whole_model import SavedModel
from ds_hybrid.moe.hugging_face_names import hugging_face_blocks, to_hugging_face

_GENERATION = "generation_config.json"


def save_pretrained(saved: SavedModel, config: Path, out: Path, *, dtype: torch.dtype, max_shard_size: str) -> None:
    """Safetensors, their index if there are several, and the configs, by the names of the model's published weights.

    Args:
        config: the model's ``config.json``.

    Raises:
        CheckpointError: transformers does not know the model, or it asks for other tensors than the checkpoint has.
    """
    model = _empty_model(config).to(dtype)
    _refuse_adapters(saved)
    is_converted = any(layer.is_converted for layer in saved.layers)
    blocks = hugging_face_blocks(model, saved.ds_config["expert_parallel"]) if is_converted else ()
    state = to_hugging_face(saved.state_dict(dtype), blocks)
    _check_names(model, state, saved)
    published = _published(model, state, [block.spec.moe_module_name for block in blocks], dtype)
    model.save_pretrained(out, state_dict=published, save_original_format=False, max_shard_size=max_shard_size)
    generation = config.parent / _GENERATION
    if generation.is_file():
        shutil.copyfile(generation, out / _GENERATION)


def save_tokenizer(folder: Path, out: Path) -> None:
    """The tokenizer of one folder, in another.

    Raises:
        CheckpointError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: holds no tokenizer that transformers can read: {_first_line(error)}"
        ) from None
    tokenizer.save_pretrained(str(out))


def _empty_model(path: Path) -> Any:
    """The Hugging Face model on the meta device."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
        trained = getattr(transformers, next(iter(config.architectures or ()), ""), None)
        with torch.device("meta"):
            return trained(config) if trained is not None else transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path}: transformers {transformers.__version__} cannot build the model: {_first_line(error)} Give "
            "--config, the config.json of the model that was trained."
        ) from None


def _published(model: Any, state: dict[str, Tensor], blocks: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """``state`` as transformers writes it, which differs from its modules: experts one by one, names of old.

    It is emptied, block by block: transformers itself would have the experts twice.
    """
    from transformers.core_model_loading import revert_weight_conversion

    in_fp32 = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    for tied in model.all_tied_weights_keys:
        state.pop(tied, None)
    published: dict[str, Tensor] = {}
    for block in (*(f"{path}." for path in blocks), ""):
        names = [name for name in state if name.startswith(block)]
        part = {name: _cast(state.pop(name), torch.float32 if _is_one_of(name, in_fp32) else dtype) for name in names}
        published |= revert_weight_conversion(model, part)
    return published


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _is_one_of(name: str, parts: Sequence[str]) -> bool:
    return any(part in name for part in parts)


def _refuse_adapters(saved: SavedModel) -> None:
    adapter = next((name for name in saved.names if name.startswith("base_model.")), None)
    if adapter is not None:
        raise CheckpointError(
            f"{saved.files.folder}: holds adapters of PEFT around the model ({adapter}), which export does not merge. "
            "They are in adapter_model.safetensors, beside the Trainer's checkpoint: PeftModel.from_pretrained reads "
            "them onto the model that was trained."
        )


def _check_names(model: Any, state: dict[str, Tensor], saved: SavedModel) -> None:
    wanted = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state.items()}
    problems = {
        "it lacks": sorted(wanted.keys() - found.keys() - model.all_tied_weights_keys.keys()),
        "it also has": sorted(found.keys() - wanted.keys()),
        "it has other shapes of": sorted(name for name in found.keys() & wanted.keys() if found[name] != wanted[name]),
    }
    if any(problems.values()):
        listed = "; ".join(f"{what} {', '.join(names[:3])}" for what, names in problems.items() if names)
        raise CheckpointError(
            f"{saved.files.folder}: not a checkpoint of this {type(model).__name__}: {listed} (three of each at most). "
            "Give --config, the config.json of the model that was trained."
        )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]

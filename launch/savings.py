"""What lets train.py do with less memory: layers that are computed again in backward, and a loss in chunks of tokens.

A plan written by ``ds_hybrid plan --write`` asks for them under ``ds_hybrid.plan.needs`` of its ds_config.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ds_hybrid.errors import ConfigError

_PLACE = "ds_hybrid.plan.needs"


@dataclass(frozen=True)
class Savings:
    """What is done to save memory.

    Attributes:
        checkpoints: layers keep only their input, and are computed again in backward.
        loss_chunk: tokens whose logits exist at one time, computed again in backward; 0 is all of them, kept.
    """

    checkpoints: bool = False
    loss_chunk: int = 0

    @property
    def words(self) -> list[str]:
        """What is done, for people."""
        chunked = [f"logits of {self.loss_chunk} tokens at a time"] if self.loss_chunk else []
        return ["activation checkpoints"] * self.checkpoints + chunked

    def with_changes(self, *, checkpoints: bool | None, loss_chunk: int | None) -> "Savings":
        """``None`` changes nothing."""
        return Savings(
            self.checkpoints if checkpoints is None else checkpoints,
            self.loss_chunk if loss_chunk is None else loss_chunk,
        )

    def apply(self, model: PreTrainedModel) -> None:
        """Before the engine is made, which keeps hold of the model's parameters."""
        if self.checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.set_output_embeddings(LossHead(model.get_output_embeddings(), self.loss_chunk))


def asked_by_plan(document: Mapping[str, Any], name: str) -> Savings:
    """What the plan in a ds_config that was read from ``name`` asks for; nothing where there is no plan.

    Raises:
        ConfigError: for values that ``ds_hybrid plan`` does not write.
    """
    needs: Any = document
    for key in _PLACE.split("."):
        needs = needs.get(key) if isinstance(needs, Mapping) else None
    if needs is None:
        return Savings()
    checkpoints = needs.get("activation_checkpoints", False) if isinstance(needs, Mapping) else None
    loss_chunk = needs.get("loss_chunk", 0) if isinstance(needs, Mapping) else None
    if not isinstance(checkpoints, bool) or type(loss_chunk) is not int or loss_chunk < 0:
        raise ConfigError(
            f"{_PLACE} = {needs!r} ({name}): activation_checkpoints must be true or false, loss_chunk a whole number "
            "of tokens, 0 for all. Write the plan anew with ds_hybrid plan --write."
        )
    return Savings(checkpoints, loss_chunk)


class LossHead(nn.Linear):
    """An output projection that, while it knows the next tokens, gives their cross entropy in place of logits.

    It has the weights of the projection in whose place it comes, under the same names. Working inside the model's
    forward, it finds them gathered under ZeRO 3. DeepSpeed's ``TiledFusedLogitsLoss`` takes gradients in forward
    instead, so that those of its weights escape the engine's scaling for accumulated micro-batches.
    """

    def __init__(self, projection: nn.Linear, chunk: int) -> None:
        """``chunk``: tokens at a time; 0 is all of them, kept for backward."""
        super().__init__(projection.in_features, projection.out_features, bias=False, device="meta")
        self.weight, self.bias = projection.weight, projection.bias
        self._chunk = chunk
        self._targets: Tensor | None = None

    @contextmanager
    def knowing(self, targets: Tensor) -> Iterator[None]:
        """Forwards within give, for ``targets`` [B, L], losses in nats, float32 [B, L]."""
        self._targets = targets
        try:
            yield
        finally:
            self._targets = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [B, L, V] of ``hidden`` [B, L, H], or losses [B, L] where the next tokens are known."""
        if self._targets is None:
            return super().forward(hidden)
        rows, targets = hidden.flatten(0, 1), self._targets.flatten()
        if self._chunk == 0:
            return self._losses(rows, targets).view_as(self._targets)
        parts = [
            checkpoint(self._losses, *part, use_reentrant=False)
            for part in zip(rows.split(self._chunk), targets.split(self._chunk), strict=True)
        ]
        return torch.cat(parts).view_as(self._targets)

    def _losses(self, rows: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(linear(rows, self.weight, self.bias).float(), targets, reduction="none")

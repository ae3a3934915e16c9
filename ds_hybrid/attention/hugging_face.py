"""Hugging Face models whose attention reaches over the ranks that share a sequence.

transformers looks attention up by name, and the mask that goes with it: a model whose config names ours calls
:class:`SharedAttention` in every layer, and makes no mask of [L, L] pairs. What a query may see follows from the
position ids and the padding of the whole sequence, which the ranks of a group tell each other once for a batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_hybrid.attention.kv_gather import KVGatherAttention
from ds_hybrid.attention.masks import MaskRule, Sight, documents_of, has_stray_positions
from ds_hybrid.attention.shards import Shards
from ds_hybrid.dispatch.meter import Meter
from ds_hybrid.dispatch.spans import SILENT, Spans
from ds_hybrid.errors import ConfigError

_SWITCH = "ds_hybrid.attention.kv_gather"
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
_UNKNOWN_ARGUMENTS = ("softcap", "s_aux", "position_bias", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k", "block_table")
"""What some models' attention takes that changes the scores, and is not known here."""
_NOT_ONE_SEQUENCE = (
    f"{_SWITCH}: the position_ids of the ranks do not make one sequence: they must go on by one, or restart at 0 "
    "where a packed document begins. Each rank holds an early and a late chunk of it, as "
    "engine.sequence_parallel.batches and .shard give them: give the model those, not the whole batch."
)


def switch_attention(model: nn.Module, attention: KVGatherAttention, name: str) -> SharedAttention:
    """Let every attention layer of ``model`` reach over the sequence-parallel group of ``attention``.

    Args:
        model: one that :func:`refuse_model` does not refuse.
        attention: exchanges keys and values.
        name: what transformers' registries are to call it; one for each group.

    Returns:
        what all layers call.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    shared = SharedAttention(attention)
    AttentionInterface.register(name, shared)
    AttentionMaskInterface.register(name, padding_alone)
    for part in hugging_face_models(model):
        part.set_attn_implementation(name)
    return shared


def refuse_model(model: nn.Module) -> None:
    """Refuse a model whose attention cannot be switched.

    Args:
        model: a ``transformers.PreTrainedModel``, or a module that holds some.

    Raises:
        ConfigError: it is none; its attention does not come from the registry; its layers mix tokens in a way that is
            not known here; or it has dropout.
    """
    models = hugging_face_models(model)
    if not models:
        raise ConfigError(
            f"{_SWITCH}: {type(model).__name__} holds no Hugging Face model, whose attention could be switched. Pass "
            'one, or set it to "off".'
        )
    problems = [problem for part in models for problem in _problems(part)]
    if problems:
        raise ConfigError(*problems)


def hugging_face_models(model: nn.Module) -> list[Any]:
    """The outermost ones in a module, itself among them."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return [model]
    return [found for child in model.children() for found in hugging_face_models(child)]


def _problems(model: Any) -> Iterator[str]:
    called = type(model).__name__
    parts = [module for module in model.modules() if hasattr(module, "_can_set_attn_implementation")]
    fixed = sorted({type(part).__name__ for part in parts if not part._can_set_attn_implementation()})
    if fixed:
        yield (
            f"{_SWITCH}: the attention of {', '.join(fixed)} cannot be switched: it does not come from transformers' "
            'attention registry. Set it to "off".'
        )
    config = model.config.get_text_config()
    if config is not model.config:
        yield (
            f"{_SWITCH}: {called} holds more than a language model, and its other parts' attention would be switched "
            "too. Train its text model alone."
        )
    others = sorted(set(_layer_kinds(config)) - _KNOWN_LAYERS)
    if others:
        yield (
            f"{_SWITCH}: {called} has layers of kind {', '.join(others)}, which would mix the tokens of this rank "
            'alone. Set it to "off".'
        )
    elif getattr(model, "_is_stateful", False):
        yield f'{_SWITCH}: {called} carries a state from token to token, on this rank alone. Set it to "off".'
    dropout = getattr(config, "attention_dropout", None) or 0
    if dropout:
        yield (
            f"{_SWITCH}: {called} has attention_dropout = {dropout}: must be 0 where keys and values are gathered. "
            "Set it to 0."
        )
    if getattr(config, "attn_logit_softcapping", None) is not None:
        yield (
            f'{_SWITCH}: {called} has attn_logit_softcapping, which no block of scores here applies. Set it to "off".'
        )


def _layer_kinds(config: Any) -> list[str]:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or []
    return list(kinds)


@dataclass(frozen=True)
class WindowedMask:
    """The mask of layers with a sliding window: some models tell it to their maker of masks, and not to attention.

    Attributes:
        is_real: [B, Ls], false at padding; None: no padding.
        window: as in :class:`ds_hybrid.attention.masks.MaskRule`.
    """

    is_real: Tensor | None
    window: int


def padding_alone(
    *, attention_mask: Tensor | None = None, use_vmap: bool = False, local_size: int | None = None, **_: Any
) -> Tensor | WindowedMask | None:
    """In the place of transformers' makers of masks: passes on which tokens of this rank are real, [B, Ls] or None, and
    how far a token sees where that is limited (``local_size``).

    Raises:
        ConfigError: the model adds a rule of its own about who sees whom.
    """
    if use_vmap:
        raise ConfigError(f'{_SWITCH}: this model masks pairs of tokens by a rule of its own. Set it to "off".')
    return attention_mask if local_size is None else WindowedMask(attention_mask, local_size)


@dataclass(frozen=True)
class _Batch:
    """What was known of a batch when its first layer asked; alive as long as its tensors are."""

    position_ids: weakref.ref[Tensor]
    is_real: weakref.ref[Tensor] | None
    versions: tuple[int, int]
    documents: Tensor
    sights: dict[MaskRule, Sight]

    def is_of(self, position_ids: Tensor, is_real: Tensor | None) -> bool:
        same_mask = is_real is None if self.is_real is None else self.is_real() is is_real and is_real is not None
        return same_mask and self.position_ids() is position_ids and self.versions == _versions(position_ids, is_real)


class SharedAttention:
    """An attention function as transformers calls it, over the ranks of a sequence-parallel group.

    Every rank of the group calls every layer, in evaluation too.

    Attributes:
        spans_of: where a layer's exchanges are noted.
    """

    def __init__(self, attention: KVGatherAttention) -> None:
        self._attention = attention
        self._batch: _Batch | None = None
        self.spans_of: Callable[[nn.Module], Spans] = silent

    @property
    def meter(self) -> Meter:
        """Counts what leaves this rank."""
        return self._attention.group.meter

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | WindowedMask | None,
        *,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        position_ids: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """This rank's part of attention.

        Args:
            module: the layer; says whether it is causal.
            query: [B, heads, Ls, d]; key [B, kv heads, Ls, d]; value [B, kv heads, Ls, dv].
            attention_mask: [B, Ls], false at padding, as :func:`padding_alone` passes it on; with its window or not.
            sliding_window: as the model says it; it goes before that of the mask.
            position_ids: [B, Ls] or [1, Ls], of this rank's balanced shard.

        Returns:
            [B, Ls, heads, dv], and None in the place of weights.

        Raises:
            ConfigError: what is not known here; or position ids that are not those of a balanced shard.
        """
        unknown = [name for name in _UNKNOWN_ARGUMENTS if others.get(name) is not None]
        if unknown:
            raise ConfigError(
                f"{_SWITCH}: {type(module).__name__} gives its attention {', '.join(unknown)}, which is not known "
                'here. Set it to "off".'
            )
        if query.shape[2] != key.shape[2]:
            raise ConfigError(
                f"{_SWITCH}: {query.shape[2]} queries and {key.shape[2]} keys: text is generated from a cache. "
                'Generate with model.set_attn_implementation("sdpa"), every rank its own text.'
            )
        if position_ids is None or position_ids.ndim != 2:
            shape = "none" if position_ids is None else list(position_ids.shape)
            raise ConfigError(
                f"{_SWITCH}: position_ids are {shape}: must be [B, {query.shape[2]}], those of this rank's shard. "
                "engine.sequence_parallel.batches and .shard give them; "
                f"{type(module).__name__} must hand them on to its attention."
            )
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if isinstance(attention_mask, WindowedMask):
            sliding_window = attention_mask.window if sliding_window is None else sliding_window
            attention_mask = attention_mask.is_real
        rule = MaskRule(causal=causal, window=sliding_window)
        sight = self._sight(rule, position_ids, attention_mask, batch=query.shape[0])
        self.meter.begin(training=module.training)
        self.meter.watched_by = self.spans_of(module)
        output = self._attention(query, key, value, sight, scale=scaling, dropout=dropout)
        return output.transpose(1, 2), None

    def _sight(self, rule: MaskRule, position_ids: Tensor, is_real: Tensor | None, *, batch: int) -> Sight:
        known = self._batch
        if known is None or not known.is_of(position_ids, is_real):
            known = _Batch(
                weakref.ref(position_ids),
                None if is_real is None else weakref.ref(is_real),
                _versions(position_ids, is_real),
                self._documents(position_ids, is_real, batch=batch),
                {},
            )
            self._batch = known
        if rule not in known.sights:
            shards = Shards(known.documents.shape[1], self._attention.group.size)
            known.sights[rule] = Sight(shards, self._attention.group.rank, rule, known.documents)
        return known.sights[rule]

    def _documents(self, position_ids: Tensor, is_real: Tensor | None, *, batch: int) -> Tensor:
        """[B, L] of the whole sequence. Collective."""
        own = torch.stack([position_ids.expand(batch, -1), torch.ones_like(position_ids).expand(batch, -1)])
        if is_real is not None:
            if is_real.ndim != 2:
                raise ConfigError(
                    f"{_SWITCH}: attention_mask {list(is_real.shape)}: must be [B, L], 0 at padding; position_ids that "
                    "restart keep packed documents apart."
                )
            own[1] = is_real
        of_ranks = self._attention.group.all_gather_metadata(own)  # [n, 2, B, Ls]
        shards = Shards(own.shape[2] * len(of_ranks), len(of_ranks))
        if shards.shard_length != own.shape[2]:
            raise ConfigError(_NOT_ONE_SEQUENCE)
        positions, real = (shards.unshard(part.transpose(0, 1).flatten(1)) for part in of_ranks.unbind(1))
        if has_stray_positions(positions, real.bool()):
            raise ConfigError(_NOT_ONE_SEQUENCE)
        return documents_of(positions, real)


def silent(_layer: nn.Module) -> Spans:
    return SILENT


def _versions(position_ids: Tensor, is_real: Tensor | None) -> tuple[int, int]:
    return _version(position_ids), -1 if is_real is None else _version(is_real)


def _version(tensor: Tensor) -> int:
    """How often it was written to; tensors made for inference do not count that."""
    return -1 if tensor.is_inference() else tensor._version

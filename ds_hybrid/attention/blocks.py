"""Attention of some queries over some keys by torch's fused kernels, and how such parts add up to the whole.

A part gives its output and the logarithm of its softmax's denominator. Two parts of the same queries merge by those
(the running softmax of FlashAttention and Ring Attention). Backward needs no merging: given the whole's output and
logarithm, the kernel's backward of a part gives just that part's share of the gradients.

Shapes here: query [B, H, Q, D], key [B, KV, K, D], value [B, KV, K, DV], output [B, H, Q, DV], lse [B, H, Q].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

Mask = Literal["full", "causal"] | Tensor
"""All is seen; nothing later than the query's row; or bool [B or 1, 1, Q, K], True where it is seen."""

_aten = torch.ops.aten


Gradients = tuple[Tensor, Tensor, Tensor]
"""Of query, key and value."""


@dataclass(frozen=True)
class Part:
    """Some queries and some keys, with what the queries see of them; ``scale`` is that of the scores."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask
    scale: float


@dataclass(frozen=True)
class Whole:
    """What a part's queries got from all keys (lse +inf: the row saw nothing), and the gradient of that."""

    output: Tensor
    lse: Tensor
    grad_output: Tensor


class Operator(Protocol):
    """Computes a part."""

    def forward(self, part: Part) -> tuple[Tensor, Tensor]:
        """Output and lse."""

    def backward(self, part: Part, whole: Whole) -> Gradients:
        """The part's share of the gradients."""


class Kernel(Operator, Protocol):
    """Computes any part. lse comes in the dtype of sums; rows that see nothing give zeros, and -inf."""

    def scores(self, query: Tensor, key: Tensor, mask: Mask, scale: float) -> Tensor:
        """The first half of a forward, which needs no values: [B, H, Q, K] in the dtype of sums."""

    def weigh(self, scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The second half: output and lse."""


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


class PlainKernel:
    """By matrix products, in the dtype of sums; all scores of the part are held at once."""

    def forward(self, part: Part) -> tuple[Tensor, Tensor]:
        return self.weigh(self.scores(part.query, part.key, part.mask, part.scale), part.value)

    def scores(self, query: Tensor, key: Tensor, mask: Mask, scale: float) -> Tensor:
        exact = sum_dtype(query.dtype)
        folded = _fold(query.to(exact), key.shape[1]) @ key.to(exact).mT * scale
        product = folded.view(*query.shape[:3], key.shape[2])
        if isinstance(mask, Tensor):
            return product.masked_fill_(~mask, -torch.inf)
        if mask == "causal":
            return product.masked_fill_(~torch.ones_like(product[0, 0], dtype=torch.bool).tril_(), -torch.inf)
        return product

    def weigh(self, scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        lse = scores.logsumexp(-1)
        weights = (scores - _finite(lse)[..., None]).exp_()
        output = _fold(weights, value.shape[1]) @ value.to(scores.dtype)
        return output.view(*scores.shape[:3], value.shape[-1]), lse

    def backward(self, part: Part, whole: Whole) -> Gradients:
        query, key, value = part.query, part.key, part.value
        exact = sum_dtype(query.dtype)
        num_kv, rows = key.shape[1], query.shape[2]
        folded_query, folded_grad = (_fold(x.to(exact), num_kv) for x in (query, whole.grad_output))
        weights = (self.scores(query, key, part.mask, part.scale) - whole.lse[..., None]).exp_()
        delta = (whole.grad_output.to(exact) * whole.output.to(exact)).sum(-1, keepdim=True)
        weights, delta = _fold(weights, num_kv), _fold(delta, num_kv)
        grad_value = weights.mT @ folded_grad
        grad_scores = weights * (folded_grad @ value.to(exact).mT - delta) * part.scale
        grad_query = (grad_scores @ key.to(exact)).view(*query.shape[:2], rows, -1)
        grad_key = grad_scores.mT @ folded_query
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype)


class FusedKernel(PlainKernel):
    """torch's fused kernels: flash on the CPU; on CUDA flash, or memory-efficient where a mask or float32 needs it.

    What none of them takes (float64 on CUDA, float16 on the CPU) is computed as :class:`PlainKernel` does.
    """

    def forward(self, part: Part) -> tuple[Tensor, Tensor]:
        operator = _operator(part)
        if operator is None:
            return super().forward(part)
        output, lse = operator.forward(_with_equal_dims(part))
        output, lse = output[..., : part.value.shape[-1]], lse.to(sum_dtype(part.query.dtype))
        return (output, lse) if isinstance(part.mask, str) else _blind_rows(output, lse, part.mask)

    def backward(self, part: Part, whole: Whole) -> Gradients:
        operator = _operator(part)
        if operator is None:
            return super().backward(part, whole)
        padded = _with_equal_dims(part)
        missing = padded.value.shape[-1] - part.value.shape[-1]
        if missing:
            output, grad_output = (pad(x, (0, missing)) for x in (whole.output, whole.grad_output))
            whole = Whole(output, whole.lse, grad_output)
        gradients = zip(operator.backward(padded, whole), (part.query, part.key, part.value), strict=True)
        grad_query, grad_key, grad_value = (grad[..., : x.shape[-1]] for grad, x in gradients)
        return grad_query, grad_key, grad_value


@dataclass
class Merged:
    """Output and lse of a rank's queries over all the parts that were added, in the dtype of sums."""

    output: Tensor
    lse: Tensor

    @classmethod
    def empty(cls, query: Tensor, value_dim: int) -> Merged:
        exact = sum_dtype(query.dtype)
        return cls(
            query.new_zeros((*query.shape[:3], value_dim), dtype=exact),
            query.new_full(query.shape[:3], -torch.inf, dtype=exact),
        )

    def add(self, rows: slice, output: Tensor, lse: Tensor) -> None:
        """Take in a part of the queries ``rows``."""
        old_lse = self.lse[:, :, rows]
        new_lse = torch.logaddexp(old_lse, lse)
        base = _finite(new_lse)
        old = self.output[:, :, rows]
        old.mul_((old_lse - base).exp_()[..., None])
        old.addcmul_(output.to(old.dtype), (lse - base).exp_()[..., None])
        old_lse.copy_(new_lse)

    def lse_for_backward(self) -> Tensor:
        """+inf for rows that saw nothing, so that their weights come out as zeros and not as NaN."""
        return self.lse.masked_fill(self.lse.isneginf(), torch.inf)


class _CpuFlash:
    """Takes fewer heads of keys than of queries, and a mask that is added to the scores."""

    def forward(self, part: Part) -> tuple[Tensor, Tensor]:
        return _aten._scaled_dot_product_flash_attention_for_cpu(
            part.query, part.key, part.value, 0.0, _is_causal(part.mask),
            attn_mask=_added(part.mask, part.query.dtype), scale=part.scale,
        )  # fmt: skip

    def backward(self, part: Part, whole: Whole) -> Gradients:
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            whole.grad_output, part.query, part.key, part.value, whole.output, whole.lse, 0.0, _is_causal(part.mask),
            attn_mask=_added(part.mask, part.query.dtype), scale=part.scale,
        )  # fmt: skip


class _CudaFlash:
    """float16 and bfloat16, no mask but the causal one. Takes fewer heads of keys than of queries."""

    def forward(self, part: Part) -> tuple[Tensor, Tensor]:
        query, key, value = _aligned(part.query, part.key, part.value)
        output, lse, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, part.mask == "causal", False, scale=part.scale
        )
        return output, lse

    def backward(self, part: Part, whole: Whole) -> Gradients:
        tensors = part.query, part.key, part.value, whole.output, whole.grad_output
        query, key, value, output, grad_output = _aligned(*tensors)
        # No dropout, so no random state; no ragged batch, so no cumulative lengths.
        random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        return _aten._scaled_dot_product_flash_attention_backward(
            grad_output, query, key, value, output, whole.lse.contiguous(), None, None, query.shape[2], key.shape[2],
            0.0, part.mask == "causal", random_state, random_state.new_empty(0), scale=part.scale,
        )  # fmt: skip


class _CudaEfficient:
    """Any mask, float32 too. Wants as many heads of keys as of queries, lse in rows of 32, and masks in rows of 16."""

    def forward(self, part: Part) -> tuple[Tensor, Tensor]:
        num_heads, num_rows = part.query.shape[1], part.query.shape[2]
        key, value = (_expanded(x, num_heads) for x in (part.key, part.value))
        query, key, value = _aligned(part.query, key, value)
        output, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, _bias(part.mask, query, key), True, 0.0, _is_causal(part.mask), scale=part.scale
        )
        return output, lse[..., :num_rows]

    def backward(self, part: Part, whole: Whole) -> Gradients:
        num_heads, num_kv, num_rows = part.query.shape[1], part.key.shape[1], part.query.shape[2]
        key, value = (_expanded(x, num_heads) for x in (part.key, part.value))
        query, key, value, output, grad_output = _aligned(part.query, key, value, whole.output, whole.grad_output)
        padded_lse = pad(whole.lse, (0, -num_rows % 32), value=torch.inf)
        random_state = torch.zeros((), dtype=torch.int64, device=query.device)
        grad_query, *gradients, _ = _aten._scaled_dot_product_efficient_attention_backward(
            grad_output, query, key, value, _bias(part.mask, query, key), output, padded_lse,
            random_state, random_state, 0.0, [True, True, True, False], _is_causal(part.mask), scale=part.scale,
        )  # fmt: skip
        grad_key, grad_value = (x.unflatten(1, (num_kv, -1)).sum(2) for x in gradients)
        return grad_query, grad_key, grad_value


def _operator(part: Part) -> Operator | None:
    """The fused kernel for such a part, if there is one."""
    query, mask = part.query, part.mask
    if query.device.type == "cpu":
        return _CpuFlash() if query.dtype in (torch.float64, torch.float32, torch.bfloat16) else None
    if query.dtype == torch.float64:
        return None
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return _CudaFlash() if is_half and isinstance(mask, str) and query.shape[-1] <= 256 else _CudaEfficient()


def _is_causal(mask: Mask) -> bool:
    return isinstance(mask, str) and mask == "causal"


def _added(mask: Mask, dtype: torch.dtype) -> Tensor | None:
    """A mask as what is added to the scores."""
    if isinstance(mask, str):
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)


def _bias(mask: Mask, query: Tensor, key: Tensor) -> Tensor | None:
    """The same for all heads, as a view of rows that begin at multiples of 16."""
    added = _added(mask, query.dtype)
    if added is None:
        return None
    num_keys = key.shape[2]
    whole_rows = pad(added, (0, -num_keys % 16))
    return whole_rows.expand(query.shape[0], query.shape[1], -1, -1)[..., :num_keys]


def _blind_rows(output: Tensor, lse: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Kernels differ in what they give for rows that see nothing: zeros and -inf here."""
    blind = ~mask.any(-1)
    return output.masked_fill(blind[..., None], 0), lse.masked_fill(blind, -torch.inf)


def _with_equal_dims(part: Part) -> Part:
    """Zeros at the end of keys and queries leave the scores as they are, and at the end of values are cut off later."""
    dim = max(part.query.shape[-1], part.value.shape[-1])
    if not part.query.is_cpu:
        dim += -dim % 8  # CUDA's kernels want it so
    tensors = part.query, part.key, part.value
    query, key, value = (pad(x, (0, dim - x.shape[-1])) if x.shape[-1] < dim else x for x in tensors)
    return Part(query, key, value, part.mask, part.scale)


def _aligned(*tensors: Tensor) -> tuple[Tensor, ...]:
    """CUDA's kernels read 16 bytes at once: what does not begin and step so is copied."""
    return tuple(x if _is_aligned(x) else x.contiguous() for x in tensors)


def _is_aligned(x: Tensor) -> bool:
    step = 16 // x.element_size()
    return x.stride(-1) == 1 and not any(stride % step for stride in (*x.stride()[:-1], x.storage_offset()))


def _expanded(x: Tensor, num_heads: int) -> Tensor:
    """[B, KV, ...] -> [B, H, ...], each head for the H / KV heads of queries that it serves."""
    return x.repeat_interleave(num_heads // x.shape[1], 1)


def _fold(x: Tensor, num_kv: int) -> Tensor:
    """[B, H, Q, X] -> [B, KV, H / KV * Q, X]: the queries of a head of keys as one matrix."""
    return x.reshape(x.shape[0], num_kv, -1, x.shape[-1])


def _finite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse.isneginf(), 0)

"""One part of attention, and parts that add up, against softmax in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hybrid.attention.blocks import (
    FusedKernel,
    Kernel,
    Mask,
    Merged,
    Part,
    PlainKernel,
    Whole,
    _CudaEfficient,
    _CudaFlash,
)

SCALE = 0.3
KERNELS = {"fused": FusedKernel(), "plain": PlainKernel()}


def tensors(num_kv_heads: int, value_dim: int = 16, num_keys: int = 40) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "query": (2, 4, 40, 16),
        "key": (2, num_kv_heads, num_keys, 16),
        "value": (2, num_kv_heads, num_keys, value_dim),
        "grad": (2, 4, 40, value_dim),
    }
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def random_mask(num_keys: int = 40) -> Tensor:
    mask = torch.rand(2, 1, 40, num_keys, generator=torch.Generator().manual_seed(2)) < 0.4
    mask[0, :, 3] = False  # a query that sees nothing
    return mask


def expected(x: dict[str, Tensor], mask: Mask) -> dict[str, Tensor]:
    query, key, value = (x[name].clone().requires_grad_() for name in ("query", "key", "value"))
    shared = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(shared, 1).mT * SCALE
    if isinstance(mask, str):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(0 if mask == "causal" else scores.shape[-1])
    blind = ~mask.any(-1, keepdim=True).expand(*scores.shape[:3], 1)
    masked = scores.masked_fill(~(mask | blind), -torch.inf)
    output = (masked.softmax(-1) @ value.repeat_interleave(shared, 1)).masked_fill(blind, 0)
    gradients = torch.autograd.grad(output, (query, key, value), x["grad"])
    lse = masked.logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)
    return {"output": output.detach(), "lse": lse.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def computed(kernel: Kernel, x: dict[str, Tensor], mask: Mask) -> dict[str, Tensor]:
    part = Part(x["query"], x["key"], x["value"], mask, SCALE)
    output, lse = kernel.forward(part)
    gradients = kernel.backward(part, Whole(output, lse.masked_fill(lse.isneginf(), torch.inf), x["grad"]))
    return {"output": output, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


@pytest.mark.parametrize("value_dim", [16, 24, 8])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("kind", ["full", "causal", "masked"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_one_part(kernel: str, kind: Any, num_kv_heads: int, value_dim: int) -> None:
    x = tensors(num_kv_heads, value_dim)
    mask = random_mask() if kind == "masked" else kind
    right = expected(x, mask)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        for name, found in computed(KERNELS[kernel], {k: v.to(dtype) for k, v in x.items()}, mask).items():
            assert found.shape == right[name].shape
            torch.testing.assert_close(found.double(), right[name], rtol=tolerance, atol=tolerance, msg=name)


def test_float16_takes_the_plain_way_on_a_cpu() -> None:
    x = tensors(2)
    right = expected(x, "causal")
    for name, found in computed(FusedKernel(), {k: v.half() for k, v in x.items()}, "causal").items():
        torch.testing.assert_close(found.double(), right[name], rtol=1e-2, atol=1e-2, msg=name)


def test_parts_add_up_in_any_order_with_rows_that_see_nothing() -> None:
    x = tensors(2, num_keys=60)
    mask = random_mask(60)
    mask[1, :, 5, :20] = False  # sees nothing of the first part, and something of the others
    right = expected(x, mask)
    kernel = FusedKernel()
    parts = [slice(0, 20), slice(20, 33), slice(33, 60)]
    for order in (parts, parts[::-1]):
        merged = Merged.empty(x["query"], 16)
        for part in order:
            for rows in (slice(0, 15), slice(15, 40)):
                merged.add(
                    rows,
                    *kernel.forward(
                        Part(
                            x["query"][:, :, rows],
                            x["key"][:, :, part],
                            x["value"][:, :, part],
                            mask[:, :, rows, part],
                            SCALE,
                        )
                    ),
                )
        torch.testing.assert_close(merged.output, right["output"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(merged.lse, right["lse"], rtol=1e-12, atol=1e-12)
        whole = Whole(merged.output, merged.lse_for_backward(), x["grad"])
        grad_query = torch.zeros_like(x["query"])
        for part in order:
            of_part = Part(x["query"], x["key"][:, :, part], x["value"][:, :, part], mask[..., part], SCALE)
            dq, dk, dv = kernel.backward(of_part, whole)
            grad_query += dq
            torch.testing.assert_close(dk, right["dk"][:, :, part], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(dv, right["dv"][:, :, part], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grad_query, right["dq"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("operator", "dtype", "kind", "num_kv_heads"),
    [
        (_CudaFlash(), torch.bfloat16, "causal", 2),
        (_CudaFlash(), torch.float16, "full", 4),
        (_CudaEfficient(), torch.bfloat16, "masked", 2),
        (_CudaEfficient(), torch.float32, "causal", 2),
    ],
)
def test_cuda_operators_take_what_they_are_given(
    operator: Any, dtype: torch.dtype, kind: str, num_kv_heads: int
) -> None:
    """Their signatures and shapes, on torch's meta device: nothing is computed."""
    x = {name: tensor.to("meta", dtype) for name, tensor in tensors(num_kv_heads).items()}
    mask: Mask = random_mask().to("meta") if kind == "masked" else kind  # type: ignore[assignment]
    part = Part(x["query"], x["key"], x["value"], mask, SCALE)
    output, lse = operator.forward(part)
    assert (output.shape, lse.shape, lse.dtype) == (x["query"].shape, (2, 4, 40), torch.float32)
    gradients = operator.backward(part, Whole(output, lse, x["grad"]))
    assert [grad.shape for grad in gradients] == [x[name].shape for name in ("query", "key", "value")]

from __future__ import annotations

import pytest
import torch

from ds_hybrid.attention.exchange import KVFormat
from ds_hybrid.dispatch.modes import WireDtype


@pytest.mark.parametrize(("wire_dtype", "tolerance"), [("auto", 0.0), ("bf16", 2**-8), ("fp8_e4m3", 2**-4)])
@pytest.mark.parametrize("dims", [(32, 32), (24, 40), (136, 8)])
def test_rows_come_back(dims: tuple[int, int], wire_dtype: WireDtype, tolerance: float) -> None:
    kind = KVFormat(2, 3, dims, torch.float32, wire_dtype)
    parts = [torch.randn(2, 3, 7, dim) for dim in dims]
    rows = kind.pack(*parts)
    assert (rows.dtype, rows.shape) == (torch.uint8, (7, kind.row_bytes))
    for part, found in zip(parts, kind.unpack(rows), strict=True):
        torch.testing.assert_close(found, part, rtol=tolerance, atol=tolerance * 0.01)
    # A part of the rows is the rows of a part.
    for part, found in zip(parts, kind.unpack(rows[2:5]), strict=True):
        torch.testing.assert_close(found, part[:, :, 2:5], rtol=tolerance, atol=tolerance * 0.01)


def test_what_travels_as_it_is_is_read_in_place() -> None:
    kind = KVFormat(1, 2, (16, 16), torch.float32)
    rows = kind.pack(torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16))
    key, value = kind.unpack(rows)
    assert {key.untyped_storage().data_ptr(), value.untyped_storage().data_ptr()} == {rows.untyped_storage().data_ptr()}


def test_gradients_come_back() -> None:
    kind = KVFormat(2, 3, (16, 24), torch.float32, "fp8_e4m3")
    parts = [torch.randn(2, 3, 7, dim) for dim in kind.dims]
    rows = kind.join_gradients(*parts)
    assert rows.shape == (7, 2 * 3 * 40)
    for part, found in zip(parts, kind.split_gradients(rows), strict=True):
        assert torch.equal(part, found)

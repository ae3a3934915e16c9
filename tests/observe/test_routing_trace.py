"""Counts are appended, files are whole at any time, and a resumed run's steps count once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ds_hybrid.errors import PlacementError
from ds_hybrid.observe import routing_trace
from ds_hybrid.observe.routing_trace import RoutingTraceWriter
from ds_hybrid.plan.model import ModelShape
from ds_hybrid.rebalance.trace import PARTS_FOLDER, is_trace, read_trace

LAYERS = ["a", "b"]


def counts(steps: range, *, factor: int = 1) -> np.ndarray:
    """[steps, 2, 4], different for every step and layer."""
    return factor * np.array([[[step, 1, 2, 3], [1, step, 5, 0]] for step in steps], dtype=np.int64)


def writer_of(folder: Path) -> RoutingTraceWriter:
    return RoutingTraceWriter(folder, LAYERS, {"top_k": [2, 2]})


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / PARTS_FOLDER).iterdir())


def test_what_is_appended_is_read_in_order(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    writer.append([1, 2, 3], counts(range(1, 4)))
    writer.append([], counts(range(0)).reshape(0, 2, 4))
    writer.append([4, 5], counts(range(4, 6)))
    assert files(tmp_path) == ["part-000001.npz"]
    assert read_trace(tmp_path).counts.tolist() == counts(range(1, 6)).tolist()
    with np.load(tmp_path / PARTS_FOLDER / "part-000001.npz") as arrays:
        assert (arrays["steps"].tolist(), arrays["layers"].tolist()) == ([1, 2, 3, 4, 5], LAYERS)
        assert arrays["counts"].dtype == np.uint32
    assert read_trace(tmp_path / PARTS_FOLDER / "part-000001.npz").counts.shape == (5, 2, 4)


def test_a_part_that_is_full_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_trace, "_PART_BYTES", 3 * 2 * 4 * 4)  # of three steps
    writer = writer_of(tmp_path)
    for step in range(1, 8):
        writer.append([step], counts(range(step, step + 1)))
    assert files(tmp_path) == [f"part-{number:06}.npz" for number in (1, 2, 3)]
    assert read_trace(tmp_path).counts.tolist() == counts(range(1, 8)).tolist()


def test_a_resumed_run_appends_and_its_steps_replace_those_that_were_lost(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    writer.append([1, 2, 3, 4], counts(range(1, 5)))
    writer = writer_of(tmp_path)  # from a checkpoint of step 2
    writer.append([3, 4, 5], counts(range(3, 6), factor=10))
    expected = [*counts(range(1, 3)).tolist(), *counts(range(3, 6), factor=10).tolist()]
    assert read_trace(tmp_path).counts.tolist() == expected
    writer.begin_part()  # back to step 4 in the same process
    writer.append([5], counts(range(5, 6), factor=100))
    assert read_trace(tmp_path).counts.tolist() == [*expected[:-1], *counts(range(5, 6), factor=100).tolist()]


def test_parts_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    writer_of(tmp_path).append([1], counts(range(1, 2)))
    folder = tmp_path / PARTS_FOLDER
    (folder / "part-000001.npz").rename(folder / "part-999999.npz")
    (folder / "part-x.npz").touch()
    writer_of(tmp_path).append([2], counts(range(2, 3)))
    assert files(tmp_path) == ["part-1000000.npz", "part-999999.npz", "part-x.npz"]
    assert read_trace(tmp_path).counts.tolist() == counts(range(1, 3)).tolist()


def test_steps_in_which_a_layer_got_no_token_are_passed_over(tmp_path: Path) -> None:
    recorded = counts(range(1, 5))
    recorded[1, 0] = recorded[2] = 0
    writer_of(tmp_path).append([1, 2, 3, 4], recorded)
    for path in (tmp_path, tmp_path / PARTS_FOLDER / "part-000001.npz"):
        assert read_trace(path).counts.tolist() == recorded[[0, 3]].tolist()
    writer_of(tmp_path).append([1], recorded[1:2])  # made again, and all others are lost
    with pytest.raises(
        PlacementError, match=r"counts \(int64 \[1, 2, 4\]\) is 0 for all experts of layer 0 at step 0\."
    ):
        read_trace(tmp_path)


def test_a_crash_while_a_part_is_written_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writer_of(tmp_path)
    writer.append([1], counts(range(1, 2)))

    def crash(file: object, **arrays: object) -> None:
        file.write(b"PK half a file")  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", crash)
        with pytest.raises(KeyboardInterrupt):
            writer.append([2], counts(range(2, 3)))
    assert read_trace(tmp_path).counts.tolist() == counts(range(1, 2)).tolist()
    writer = writer_of(tmp_path)
    writer.append([2], counts(range(2, 3)))
    assert read_trace(tmp_path).counts.tolist() == counts(range(1, 3)).tolist()


def test_the_planner_reads_a_runs_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_hybrid.plan.popularity import read_popularity
    from ds_hybrid.plan.routing import read_routing
    from tests.plan.test_popularity import QWEN

    model: ModelShape = QWEN
    draw = np.random.default_rng(0)
    shares = np.ones(model.num_experts) / model.num_experts
    recorded = draw.multinomial(100_000, shares, size=(3, 2))
    RoutingTraceWriter(tmp_path, LAYERS, {}).append([1, 2, 3], recorded)
    assert is_trace(str(tmp_path))
    popularity = read_popularity(str(tmp_path), model, num_steps=None)
    assert popularity.weights.tolist() == recorded.tolist()
    law = read_routing(str(tmp_path), model)
    assert law.inclusion.shape[1] == model.num_experts


def test_directories_without_a_trace_and_damaged_parts_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"has no routing trace .*observe\.routing_trace"):
        read_trace(tmp_path)
    writer_of(tmp_path).append([1], counts(range(1, 2)))
    part = tmp_path / PARTS_FOLDER / "part-000002.npz"
    part.write_bytes(b"PK")
    with pytest.raises(PlacementError, match=r"part-000002\.npz: not a \.npz file"):
        read_trace(tmp_path)
    np.savez(part, counts=np.ones((1, 3, 4), dtype=int), steps=np.array([2]))
    with pytest.raises(PlacementError, match=r"part-000002\.npz: has \[layers, experts\] \[3, 4\], .* \[2, 4\]"):
        read_trace(tmp_path)
    np.savez(part, counts=np.ones((1, 2, 4), dtype=int))
    with pytest.raises(PlacementError, match=r"part-000002\.npz: steps must be one integer"):
        read_trace(tmp_path)

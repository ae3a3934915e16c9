"""Places in nodes, and nodes that cannot be cut evenly."""

from __future__ import annotations

import pytest

from ds_hybrid.dispatch.nodes import places_in_nodes
from ds_hybrid.errors import DispatchError


@pytest.mark.parametrize(
    ("node_of_rank", "places"),
    [((0, 0, 1, 1), (0, 1, 0, 1)), ((0, 1, 1, 0), (0, 0, 1, 1)), ((0, 1, 2), (0, 0, 0)), ((0, 0), (0, 1))],
)
def test_place_counts_the_ranks_before_on_the_node(node_of_rank: tuple[int, ...], places: tuple[int, ...]) -> None:
    assert places_in_nodes(node_of_rank) == places


def test_uneven_nodes_are_refused() -> None:
    with pytest.raises(DispatchError) as error:
        places_in_nodes((0, 0, 0, 1))
    assert str(error.value) == (
        "the nodes hold 3, 1 ranks of the expert-parallel group, must hold the same number. "
        'Choose another autoep_size, or ds_hybrid.dispatch.mode "two_stage".'
    )

"""Fixtures of the room."""

from tests.doctor.stand_ins import stand_ins

__all__ = ["stand_ins"]

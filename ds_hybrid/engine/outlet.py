"""What rank 0 writes and shows cannot end the training, nor leave the other ranks waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from deepspeed.utils import logger

T = TypeVar("T")


class Outlet(Generic[T]):
    """Where something is written or shown. What fails once is left alone from then on, with one warning.

    Args:
        name: of it, for the warning.
        target: None where this rank writes nothing there.
        release: lets go of the target when nothing more is to come.
    """

    def __init__(self, name: str, target: T | None, release: Callable[[T], None] | None = None) -> None:
        self._name = name
        self._target = target
        self._release = release

    def tell(self, tell: Callable[[T], None]) -> None:
        """Let ``tell`` compose and write something. It is not called where nothing is written."""
        if self._target is None:
            return
        try:
            tell(self._target)
        except Exception as error:
            # Whatever it was: raised on this rank alone, it would leave the others waiting in their next exchange.
            self._warn(error)
            self.close()

    def close(self) -> None:
        """Nothing more is to come."""
        target, self._target = self._target, None
        if target is None or self._release is None:
            return
        try:
            self._release(target)
        except Exception as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        logger.warning(
            f"ds_hybrid: observe: {self._name}: {kind}{error}. Nothing more is written there; training goes on."
        )

"""The named colours that are nearest to a colour."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuserve import errors
from gpuserve.decorators import ConstantPadder, batch, first_value, group_by_keys, group_by_values

PALETTE = {
    b"black": (0, 0, 0),
    b"white": (255, 255, 255),
    b"grey": (128, 128, 128),
    b"silver": (192, 192, 192),
    b"red": (255, 0, 0),
    b"maroon": (128, 0, 0),
    b"orange": (255, 165, 0),
    b"yellow": (255, 255, 0),
    b"green": (0, 128, 0),
    b"lime": (0, 255, 0),
    b"teal": (0, 128, 128),
    b"blue": (0, 0, 255),
    b"navy": (0, 0, 128),
    b"purple": (128, 0, 128),
    b"pink": (255, 192, 203),
}
NAMES = np.array(list(PALETTE))
COLOURS = np.array(list(PALETTE.values()), dtype=np.float32)
#: Is not near to anything.
UNKNOWN = (np.nan, np.nan, np.nan)


@group_by_keys
@batch
@group_by_values("count", pad_fn=ConstantPadder(np.nan))
@first_value("count")
def nearest(
    count: np.int32, light: NDArray[np.float32] | None = None, name: NDArray[np.object_] | None = None
) -> dict[str, NDArray[Any]]:
    """Answers ``names``: bytes, and ``distances``: float32, both [rows, count] and the nearest first.

    A name that is not in the palette has empty names and distances that are not a number.

    Args:
        count: how many colours each row wants.
        light: the colours, each number 0 to 255: RGB [rows, 3] or grey [rows, 1].
        name: the colours, [rows, 1]; one of the two is given.

    Raises:
        InvalidArgument: neither is given, or ``light`` has neither 1 nor 3 numbers a row.
    """
    wanted = _wanted(light, name)
    distances = np.linalg.norm(wanted[:, np.newaxis] - COLOURS, axis=2)
    order = np.argsort(distances, axis=1, kind="stable")[:, : max(count, 0)]
    distances = np.take_along_axis(distances, order, axis=1)
    return {"names": np.where(np.isnan(distances), b"", NAMES[order]), "distances": distances}


def _wanted(light: NDArray[np.float32] | None, name: NDArray[np.object_] | None) -> NDArray[np.float32]:
    """The colours as RGB, [rows, 3]."""
    if name is not None:
        return np.array([PALETTE.get(one, UNKNOWN) for one in name[:, 0]], dtype=np.float32)
    if light is None or light.shape[1] not in (1, 3):
        raise errors.InvalidArgument("expected either name, or light with 1 or 3 numbers")
    return np.broadcast_to(light, (len(light), 3))

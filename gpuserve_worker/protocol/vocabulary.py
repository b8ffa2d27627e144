"""How the messages of a channel are written and read: msgpack arrays that begin with a tag. Several in one
datagram are an array of them. Which messages there are is said where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgpack

#: How msgpack begins an array of up to 15 elements, and of up to 65,535.
_FEW: Final = 0x90
_MANY: Final = 0xDC
_MOST_FEW: Final = 15


class WireError(Exception):
    """The peer sent something that is no message of this protocol."""


class Vocabulary:
    """The messages of one channel: tag -> class. Encodes and decodes nothing else."""

    def __init__(self, classes: dict[int, Any]) -> None:
        self._classes = classes
        self._tags = {cls: tag for tag, cls in classes.items()}
        #: Those that are not in use: another thread, or what runs when an object dies, may encode meanwhile.
        self._packers: list[msgpack.Packer] = []

    def encode(self, message: Any) -> bytes:
        fields = (self._tags[type(message)], *message)
        try:
            packer = self._packers.pop()
        except IndexError:
            packer = msgpack.Packer()
        packed: bytes
        try:
            packed = packer.pack(fields)
        except UnicodeEncodeError:  # half a surrogate pair, as in the name of a file that is not UTF-8
            return bytes(msgpack.packb(fields, unicode_errors="backslashreplace"))
        self._packers.append(packer)
        return packed

    def decode(self, data: bytes | memoryview) -> Any:
        """The only message in a datagram; raises ``WireError``."""
        messages = self.decode_all(data)
        if len(messages) != 1:
            raise WireError(f"{len(messages)} messages where one should be")
        return messages[0]

    def decode_all(self, data: bytes | memoryview) -> list[Any]:
        """The messages in a datagram; raises ``WireError``. Nested tuples arrive as plain tuples;
        ``tensors()`` and its kin name their fields again.
        """
        try:
            found = msgpack.unpackb(data, use_list=False, strict_map_key=False)
            if type(found[0]) is tuple:
                return [self._classes[tag](*fields) for tag, *fields in found]
            tag, *fields = found
            return [self._classes[tag](*fields)]
        except (ValueError, LookupError, TypeError, msgpack.UnpackException) as error:
            raise WireError(f"not a message of this channel: {error}") from error


def joined(encoded: Sequence[bytes]) -> bytes:
    """The datagram of these messages, of which there is at least one."""
    n = len(encoded)
    if n == 1:
        return encoded[0]
    head = bytes((_FEW | n,)) if n <= _MOST_FEW else bytes((_MANY, n >> 8, n & 255))
    return b"".join((head, *encoded))

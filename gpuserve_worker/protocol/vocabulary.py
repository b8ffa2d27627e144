"""How the messages of a channel are written and read: msgpack arrays that begin with a tag. Which messages
there are is said where they are.
"""

from __future__ import annotations

from typing import Any

import msgpack


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
        """The message in a datagram; raises ``WireError``. Nested tuples arrive as plain tuples;
        ``tensors()`` and its kin name their fields again.
        """
        try:
            tag, *fields = msgpack.unpackb(data, use_list=False, strict_map_key=False)
            return self._classes[tag](*fields)
        except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
            raise WireError(f"not a message of this channel: {error}") from error

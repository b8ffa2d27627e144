"""Huffman coding of header strings (RFC 7541, 5.2 and appendix B). Pure."""

from __future__ import annotations

import functools
from typing import Final

#: The length in bits of each symbol's code, one digit of base 36 a symbol; the last is the end of string.
_LENGTHS: Final = (
    "dnsssssssoussussssssssusssssssss6aacd68baa8b8666555666666678f6ca"
    "d67777777777777777777777878djde6f56565666577666567655677777fbeds"
    "kmkkmmmnmnnnnnonoomnonnnnlmnmnnomlkmmnnlnmmolmnnllmlnmnnkmmmnmmn"
    "qqkjmnmpqqqrrqopjlqrrqrollqqsrrrkoklmllnmmppooqnqrqqrrrrrsrrrrrq"
    "u"
)
_EOS: Final = 256
#: Strings up to this size are remembered: a client sends the same few.
_REMEMBERED_NBYTES: Final = 128


class HuffmanError(ValueError):
    """The bytes are no Huffman-coded string."""


def decode(coded: bytes) -> bytes:
    """The string; HuffmanError: padding of eight bits or more, or not of ones, or the end of string in it."""
    return _remembered(coded) if len(coded) <= _REMEMBERED_NBYTES else _decode(coded)


class _Node(dict[int, "tuple[bytes, _Node]"]):
    """A place within a code. By the byte that comes next: the symbols that end in it, and the place after it,
    which is found out when it first comes. There are 256 places, so all of it stays below 10 MB.
    """

    __slots__ = ("children", "is_padding", "symbol")

    def __init__(self, is_padding: bool) -> None:
        self.children: list[_Node] = []
        #: Whether a string may end here: after seven ones at most.
        self.is_padding = is_padding
        self.symbol = -1

    def __missing__(self, byte: int) -> tuple[bytes, _Node]:
        node, text = self, b""
        for bit in range(7, -1, -1):
            node = node.children[byte >> bit & 1]
            if node.symbol == _EOS:
                raise HuffmanError("it contains the end of string")
            if node.symbol >= 0:
                node, text = _tree(), text + bytes((node.symbol,))
        self[byte] = text, node
        return text, node


def _decode(coded: bytes) -> bytes:
    node = _tree()
    texts = []
    for byte in coded:
        text, node = node[byte]
        texts.append(text)
    if not node.is_padding:
        raise HuffmanError("its padding is wrong")
    return b"".join(texts)


_remembered = functools.lru_cache(maxsize=1024)(_decode)


@functools.cache
def _tree() -> _Node:
    """The place before every code. They are canonical: of each level of the tree the first places are its
    codes, in the order of the symbols, and from the others the longer ones go on.
    """
    lengths = [int(digit, 36) for digit in _LENGTHS]
    root = _Node(is_padding=True)
    level = [root]
    for depth in range(1, max(lengths) + 1):
        for node in level:
            node.children = [_Node(False), _Node(node.is_padding and depth <= 7)]
        level = [child for node in level for child in node.children]
        for symbol in [symbol for symbol, length in enumerate(lengths) if length == depth]:
            level.pop(0).symbol = symbol
    return root

"""Huffman coding of header strings (RFC 7541, 5.2 and appendix B). Pure."""

from __future__ import annotations

import functools
from bisect import bisect_right
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
_WINDOW_BITS: Final = 30
_SHORTEST: Final = 5
_BLOCK_NBYTES: Final = 128
#: Strings up to this size are remembered: a client sends the same few.
_REMEMBERED_NBYTES: Final = 128


class HuffmanError(ValueError):
    """The bytes are no Huffman-coded string."""


def decode(coded: bytes) -> bytes:
    """The string; HuffmanError: padding of eight bits or more, or not of ones, or the end of string in it."""
    return _remembered(coded) if len(coded) <= _REMEMBERED_NBYTES else _decode(coded)


def _decode(coded: bytes) -> bytes:
    """Block by block, as a step costs what the number has that it is taken from."""
    text = bytearray()
    bits, n_bits = 0, 0
    for start in range(0, len(coded), _BLOCK_NBYTES):
        block = coded[start : start + _BLOCK_NBYTES]
        bits = bits << len(block) * 8 | int.from_bytes(block)
        n_bits = _take_symbols(bits, n_bits + len(block) * 8, text)
        bits &= (1 << n_bits) - 1
    if n_bits > 7 or bits != (1 << n_bits) - 1:
        raise HuffmanError("its padding is wrong")
    return bytes(text)


def _take_symbols(bits: int, n_bits: int, text: bytearray) -> int:
    """Append the whole symbols; how many bits are left over. Canonical: of all codes in a window of 30 bits,
    a longer one is a larger number.
    """
    limits, lengths, first, symbols = _tables()
    # Ones behind the end, as padding has.
    bits = bits << _WINDOW_BITS | (1 << _WINDOW_BITS) - 1
    while n_bits >= _SHORTEST:
        window = bits >> n_bits & (1 << _WINDOW_BITS) - 1
        row = bisect_right(limits, window)
        length = lengths[row]
        if length > n_bits:
            break
        symbol = symbols[first[row] + (window >> _WINDOW_BITS - length)]
        if symbol == _EOS:
            raise HuffmanError("it contains the end of string")
        text.append(symbol)
        n_bits -= length
    return n_bits


_remembered = functools.lru_cache(maxsize=1024)(_decode)


@functools.cache
def _tables() -> tuple[list[int], list[int], list[int], list[int]]:
    """By row, one for each length that there is: where the windows of the next one begin, the length, and
    what to add to a code to find its symbol; and the symbols in the order of their codes.
    """
    lengths = [int(digit, 36) for digit in _LENGTHS]
    symbols = sorted(range(len(lengths)), key=lambda symbol: (lengths[symbol], symbol))
    limits, rows, first = [], [], []
    code, previous = 0, 0
    for position, symbol in enumerate(symbols):
        length = lengths[symbol]
        if length != previous:
            code <<= length - previous
            rows.append(length)
            first.append(position - code)
            limits.append(0)
            previous = length
        code += 1
        limits[-1] = code << _WINDOW_BITS - length
    return limits[:-1], rows, first, symbols

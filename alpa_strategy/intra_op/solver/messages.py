"""Protocol buffers filled from arrays at once.

A message's repeated numbers lie in its wire format one after the other. Written there by numpy they
are read in C++; given as Python numbers, a large program takes as long to hand over as to solve.
"""

from typing import Any, Protocol, TypeVar

import numpy as np


class Message(Protocol):
    """A protocol buffer."""

    DESCRIPTOR: Any

    def ParseFromString(self, data: bytes) -> Any:
        """Take the fields from their wire format."""


M = TypeVar("M", bound=Message)

# Of a field whose bytes follow their number, as packed numbers do.
LENGTH_DELIMITED = 2


def filled(kind: type[M], **arrays: np.ndarray) -> M:
    """Return a message of a kind with these repeated fields: doubles, bools or integers from 0."""
    parts = []
    for name, array in arrays.items():
        number = kind.DESCRIPTOR.fields_by_name[name].number
        content = _packed(array)
        head = np.array([number << 3 | LENGTH_DELIMITED, len(content)])
        parts += [_varints(head), content]
    message = kind()
    message.ParseFromString(b"".join(parts))
    return message


def _packed(array: np.ndarray) -> bytes:
    """Return the bytes of a repeated field of numbers."""
    if array.dtype.kind == "f":
        return array.astype("<f8").tobytes()
    if array.dtype.kind == "b":
        return array.astype(np.uint8).tobytes()
    return _varints(array)


def _varints(numbers: np.ndarray) -> bytes:
    """Return integers from 0 on as bytes: seven bits per byte, lowest first; the eighth bit
    announces another byte.
    """
    if not len(numbers):
        return b""
    most_bytes = max(1, -(-int(numbers.max()).bit_length() // 7))
    place = np.arange(most_bytes)
    rest = numbers.astype(np.int64)[:, None] >> (7 * place)
    is_there = (rest > 0) | (place == 0)
    goes_on = np.zeros_like(is_there)
    goes_on[:, :-1] = is_there[:, 1:]
    written = (rest & 0x7F) | (goes_on << 7)
    return written[is_there].astype(np.uint8).tobytes()

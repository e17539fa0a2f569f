"""Prefix keys. Knows token ids and the digest of an identity or a manifest; knows nothing of tensors or text.

A key finds a candidate; the ids that are stored with it decide. Schema and golden vectors: docs/keys.md.
"""

import sys
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import NewType

from kvouch.digest import Digest
from kvouch.errors import IdentityError, InvalidIds, UsageError
from kvouch.identity.identity import Identity

SCHEMA = "kvouch/prefix/1"
PrefixKey = NewType("PrefixKey", str)
"""sha256 in hex over the schema, a root digest and the ids of [0, n)."""

ID_CODE, ID_BYTES = next((code, 4) for code in "IL" if array(code).itemsize == 4)
MOST_ID = 2**32 - 1


def prefix_key(root: Identity | str, ids: Sequence[int]) -> PrefixKey:
    """The key of ids under an identity, or under the digest of an identity or a manifest (64 hex digits)."""
    return PrefixKey(Digest(SCHEMA).field(_root_bytes(root)).update(_little_endian(pack_ids(ids))).hex())


def block_keys(root: Identity | str, ids: Sequence[int], block_tokens: int) -> list[PrefixKey]:
    """The key of every whole number of blocks that `ids` fills, shortest first, in one pass."""
    if type(block_tokens) is not int or block_tokens < 1:
        raise UsageError(f"block_tokens is {block_tokens!r}; a whole number, 1 or more, is needed")
    packed = pack_ids(ids)
    return boundary_keys(root, packed, range(block_tokens, len(packed) + 1, block_tokens))


def boundary_keys(root: Identity | str, ids: Sequence[int], lengths: Sequence[int]) -> list[PrefixKey]:
    """The keys of ids[:n] for each n of `lengths`, ascending."""
    packed = pack_ids(ids)
    if any(a > b for a, b in pairwise([0, *lengths, len(packed)])):
        raise UsageError(f"lengths are {list(lengths)[:8]}; ascending ones from 0 to {len(packed)} are needed")
    digest, stops = Digest(SCHEMA).field(_root_bytes(root)), [length * ID_BYTES for length in lengths]
    return [PrefixKey(key) for key in digest.running_hex(_little_endian(packed), stops)]


def pack_ids(ids: Sequence[int]) -> "array[int]":
    """Ids as an array of 4 bytes each; InvalidIds names the first that is no whole number in [0, 2**32).

    Whole numbers are what Python takes for an index: an int, also numpy's, and True for 1.
    """
    if isinstance(ids, array) and ids.typecode == ID_CODE:
        return ids[:]
    if not isinstance(ids, Sequence | array) or isinstance(ids, str):
        raise InvalidIds(f"ids are {type(ids).__name__}; a sequence of whole numbers is needed")
    try:
        return array(
            ID_CODE, ids if isinstance(ids, list | tuple) else list(ids)
        )  # of bytes it would take four for one
    except (OverflowError, TypeError):
        raise _invalid(ids) from None


def _invalid(ids: Sequence[int]) -> InvalidIds:
    for index, one in enumerate(ids):
        try:
            array(ID_CODE, [one])
        except (OverflowError, TypeError):
            return InvalidIds(f"ids[{index}] is {one!r}; a whole number from 0 to {MOST_ID} is needed")
    return InvalidIds("ids changed while they were read")


def _little_endian(packed: "array[int]") -> memoryview:
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed).cast("B")


def _root_bytes(root: Identity | str) -> bytes:
    text = root.digest if isinstance(root, Identity) else root
    try:
        found = bytes.fromhex(text)
    except (TypeError, ValueError):
        found = b""
    if len(found) != 32 or len(text) != 64:
        raise IdentityError(f"the root of a key is {text!r}; a digest of 64 hex digits is needed")
    return found

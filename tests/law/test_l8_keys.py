"""L8: the same inputs give the same key in every process and on every machine, as long as the schema tag stands."""

import dataclasses
import hashlib
import itertools
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvouch.errors import IdentityError, InvalidIds, UsageError
from kvouch.identity.identity import AdapterIdentity, Identity
from kvouch.identity.keys import block_keys, boundary_keys, pack_ids, prefix_key

pytestmark = pytest.mark.law(8)

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[1] / "vectors" / "keys.json").read_text("utf-8"))


def identity_of(fields: dict[str, Any]) -> Identity:
    adapters = tuple(AdapterIdentity(**one) for one in fields.get("adapters", ()))
    return Identity(**{**fields, "adapters": adapters})


PLAIN = identity_of(VECTORS["identities"][0]["fields"])


def changed(**fields: Any) -> Identity:
    return dataclasses.replace(PLAIN, **fields)


@pytest.mark.parametrize("vector", VECTORS["identities"], ids=lambda vector: vector["name"])
def test_identities_have_their_golden_digests(vector: dict[str, Any]) -> None:
    assert identity_of(vector["fields"]).digest == vector["digest"]


@pytest.mark.parametrize("vector", VECTORS["keys"], ids=lambda vector: f"{len(vector['ids'])} ids")
def test_keys_are_golden(vector: dict[str, Any]) -> None:
    assert prefix_key(vector["root"], vector["ids"]) == vector["key"]


def test_the_vectors_follow_from_the_page_alone() -> None:
    """docs/keys.md, written again with nothing but hashlib."""

    def field(data: bytes) -> bytes:
        return struct.pack("<Q", len(data)) + data

    for vector in VECTORS["keys"]:
        data = field(b"kvouch/prefix/1") + field(bytes.fromhex(vector["root"]))
        data += b"".join(struct.pack("<I", one) for one in vector["ids"])
        assert hashlib.sha256(data).hexdigest() == vector["key"]
    for vector in VECTORS["identities"]:
        data = field(b"kvouch/identity/1")
        for name in VECTORS["field_order"]:
            value = vector["fields"].get(name, [] if name == "adapters" else "")
            if value is None:
                encoded = b"n"
            elif name == "adapters":
                encoded = b"a" + struct.pack("<Q", len(value))
                for one in value:
                    encoded += field(one["digest"].encode()) + struct.pack("<d", one["scale"])
            else:
                encoded = b"s" + value.encode()
            data += field(name.encode()) + field(encoded)
        assert hashlib.sha256(data).hexdigest() == vector["digest"]


def test_the_order_of_fields_is_that_of_the_page() -> None:
    assert [field.name for field in dataclasses.fields(Identity)] == VECTORS["field_order"]


@pytest.mark.parametrize("seed", ["0", "1", "12345"])
def test_processes_with_other_hash_seeds_give_the_golden_keys(seed: str) -> None:
    program = (
        "import json, sys; from kvouch.identity.keys import prefix_key; "
        "print(json.dumps([prefix_key(v['root'], v['ids']) for v in json.load(sys.stdin)]))"
    )
    ran = subprocess.run(
        [sys.executable, "-O", "-c", program],
        input=json.dumps(VECTORS["keys"]),
        env={"PYTHONHASHSEED": seed, "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout) == [vector["key"] for vector in VECTORS["keys"]]


def test_one_pass_gives_the_keys_of_all_boundaries() -> None:
    ids = list(range(1, 101))
    assert block_keys(PLAIN, ids, 16) == [prefix_key(PLAIN, ids[:end]) for end in range(16, 101, 16)]
    assert boundary_keys(PLAIN, ids, [0, 1, 100]) == [prefix_key(PLAIN, ids[:end]) for end in (0, 1, 100)]
    assert block_keys(PLAIN, ids[:15], 16) == []
    assert len(set(block_keys(PLAIN, ids, 1))) == 100


def test_the_same_text_in_two_fields_is_two_identities() -> None:
    """For all pairs of fields: a value moved from one to the other gives another digest."""
    names = [field.name for field in dataclasses.fields(Identity) if field.name != "adapters"]
    digests = set()
    for name in names:
        for text in ("org_1", "2345", "org_12345"):
            digests.add(changed(**{name: text}).digest)
    assert len(digests) == 3 * len(names)
    for a, b in itertools.permutations(names, 2):
        one = changed(**{a: "org_1", b: "2345"})
        other = changed(**{a: "org_12345", b: ""})
        assert one.digest != other.digest
        assert one.digest != changed(**{a: "2345", b: "org_1"}).digest


def test_adapters_are_never_taken_for_text() -> None:
    one = AdapterIdentity(digest="a" * 64, scale=1.0)
    variants = [(), (one,), (one, one), (AdapterIdentity(digest="a" * 64, scale=1.5),)]
    variants += [(AdapterIdentity(digest="b" * 64, scale=1.0), one), (one, AdapterIdentity(digest="b" * 64, scale=1.0))]
    digests = {changed(adapters=adapters).digest for adapters in variants}
    assert len(digests) == len(variants)
    assert changed(tokenizer=None).digest != changed(tokenizer="").digest


def test_a_record_comes_back_and_a_changed_one_does_not() -> None:
    record = json.loads(json.dumps(PLAIN.to_dict()))
    assert Identity.from_dict(record) == PLAIN
    for name in VECTORS["field_order"]:
        other = {**record, name: [{"digest": "0" * 64, "scale": 2.0}] if name == "adapters" else "other"}
        with pytest.raises(IdentityError, match="digest is not that of its fields"):
            Identity.from_dict(other)
        with pytest.raises(IdentityError):
            Identity.from_dict({key: value for key, value in record.items() if key != name})
    with pytest.raises(IdentityError, match="an identity of schema kvouch/identity/1 is needed"):
        Identity.from_dict({**record, "schema": "kvouch/identity/2"})


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, -1], r"ids\[1\] is -1"),
        ([2**32], r"ids\[0\] is 4294967296"),
        ([10**400], r"ids\[0\] is 1000"),
        ([1, 2, 3.0], r"ids\[2\] is 3.0"),
        (["7"], r"ids\[0\] is '7'"),
        ([None], r"ids\[0\] is None"),
    ],
    ids=repr,
)
def test_ids_that_are_none_are_named(ids: list[Any], message: str) -> None:
    with pytest.raises(InvalidIds, match=message):
        prefix_key(PLAIN, ids)


def test_ids_are_four_bytes_little_endian() -> None:
    packed = pack_ids([0, 1, 256, 2**32 - 1])
    if sys.byteorder == "big":
        packed.byteswap()
    assert packed.tobytes() == struct.pack("<4I", 0, 1, 256, 2**32 - 1)
    assert pack_ids(packed) == packed


@pytest.mark.parametrize("root", ["", "a" * 63, "g" * 64, "a" * 128, " " + "a" * 63, None, 7], ids=repr)
def test_a_root_that_is_no_digest_is_refused(root: Any) -> None:
    with pytest.raises(IdentityError, match="root of a key"):
        prefix_key(root, [1])


@pytest.mark.parametrize("block", [0, -1, 1.5, True])
def test_a_block_has_a_whole_number_of_tokens(block: Any) -> None:
    with pytest.raises(UsageError, match="block_tokens"):
        block_keys(PLAIN, [1, 2], block)


@pytest.mark.parametrize("ids", [None, 5, "abc", {1: 2}, {1}], ids=repr)
def test_what_is_no_sequence_of_ids_is_refused(ids: Any) -> None:
    with pytest.raises(InvalidIds, match="a sequence of whole numbers"):
        prefix_key(PLAIN, ids)


def test_bytes_are_ids_one_by_one() -> None:
    assert prefix_key(PLAIN, bytes([1, 0, 0, 0])) == prefix_key(PLAIN, [1, 0, 0, 0]) != prefix_key(PLAIN, [1])


@pytest.mark.parametrize("lengths", [[5], [4, 2], [-1], [1, 3]], ids=repr)
def test_a_key_of_ids_that_are_not_there_is_refused(lengths: list[int]) -> None:
    with pytest.raises(UsageError, match="ascending ones from 0 to 2"):
        boundary_keys(PLAIN, [1, 2], lengths)


@pytest.mark.parametrize("wrong", [1, float("nan"), None], ids=repr)
def test_an_adapter_has_a_text_and_a_float(wrong: Any) -> None:
    with pytest.raises(IdentityError, match="scale of an adapter"):
        AdapterIdentity(digest="a", scale=wrong)
    with pytest.raises(IdentityError, match="digest of an adapter"):
        AdapterIdentity(digest=wrong, scale=1.0)
    assert AdapterIdentity(digest="a", scale=-0.0).scale.hex() == "0x0.0p+0"

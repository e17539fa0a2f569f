"""Identity: every input of the computation except the token ids. Knows names and digests; needs no tensor library.

Two computations share keys and values only if their identities are equal. How the digest is made is written down in
docs/keys.md, for other languages; a new field is a new schema tag.
"""

import dataclasses
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from kvouch.digest import Digest
from kvouch.errors import IdentityError

SCHEMA = "kvouch/identity/1"


@dataclass(frozen=True, kw_only=True)
class AdapterIdentity:
    """An adapter that takes part: the digest of its files' contents, and its scale."""

    digest: str
    scale: float

    def __post_init__(self) -> None:
        if not isinstance(self.digest, str):
            raise IdentityError(f"identity: the digest of an adapter is {self.digest!r}, which is no text")
        if type(self.scale) is not float or not math.isfinite(self.scale):
            raise IdentityError(f"identity: the scale of an adapter is {self.scale!r}; a finite float is needed")
        object.__setattr__(self, "scale", self.scale + 0.0)  # one zero


@dataclass(frozen=True, kw_only=True)
class FieldDifference:
    """The first field in which two identities differ."""

    field: str
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        return f"{self.field}: {_short(self.ours)}, {_short(self.theirs)}"


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Which computation keys and values belong to. Fields are in the order in which they are compared and hashed."""

    weights: str  # digest of the weight files, or of the bytes in memory once those were changed
    adapters: tuple[AdapterIdentity, ...] = ()
    tokenizer: str | None  # digest of tokenizer.json; None where the model has none
    config: str  # canonical JSON of every number that changes the computation
    positions: str  # canonical JSON of how positions are encoded: rope, or learned
    weights_dtype: str
    cache_dtype: str
    numerics: str  # what this machine computes: a fingerprint at grade bitwise, names at grade within
    salt: str = ""  # tenants that never share

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "adapters":
                whole = type(value) is tuple and all(isinstance(one, AdapterIdentity) for one in value)
            else:
                whole = isinstance(value, str) or (value is None and field.name == "tokenizer")
            if not whole:
                raise IdentityError(f"identity: {field.name} is {value!r}, which is not of its type")

    @cached_property
    def digest(self) -> str:
        """sha256 in hex over every field, by name, type and length: no two identities feed it the same bytes."""
        digest = Digest(SCHEMA)
        for field in dataclasses.fields(self):
            digest.texts(field.name).field(_encoded(getattr(self, field.name)))
        return digest.hex()

    def diff(self, other: "Identity") -> FieldDifference | None:
        """The first field that differs, or None."""
        for field in dataclasses.fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                return FieldDifference(field=field.name, ours=ours, theirs=theirs)
        return None

    def to_dict(self) -> dict[str, Any]:
        """The whole record, for machines: schema, digest and every field."""
        return {"schema": SCHEMA, "digest": self.digest, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], where: str = "identity") -> Self:
        """What `to_dict` gave; IdentityError where it is of another schema, or its digest is not its own."""
        if not isinstance(fields, Mapping) or fields.get("schema") != SCHEMA:
            raise IdentityError(f"{where}: an identity of schema {SCHEMA} is needed")
        names = [field.name for field in dataclasses.fields(cls)]
        if odd := fields.keys() ^ {"schema", "digest", *names}:
            raise IdentityError(
                f"{where}: an identity has just the fields of its schema; missing or unknown: {sorted(odd)}"
            )
        try:
            named = {name: fields[name] for name in names}
            named["adapters"] = tuple(AdapterIdentity(**one) for one in named["adapters"])
            found = cls(**named)
            if found.digest != fields["digest"]:
                raise ValueError("its digest is not that of its fields")
        except (TypeError, ValueError) as error:
            raise IdentityError(f"{where}: not a whole identity ({error})") from error
        return found


def _encoded(value: str | tuple[AdapterIdentity, ...] | None) -> bytes:
    """A tag for the type, then the value: text is never taken for its absence, nor for adapters."""
    if value is None:
        return b"n"
    if isinstance(value, str):
        return b"s" + value.encode("utf-8", "surrogatepass")
    adapters = b"".join(
        len(one.digest.encode()).to_bytes(8, "little") + one.digest.encode() + struct.pack("<d", one.scale)
        for one in value
    )
    return b"a" + len(value).to_bytes(8, "little") + adapters


def _short(value: Any) -> str:
    text = str(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 64 else f"{text[:48]}... ({len(text)} characters)"

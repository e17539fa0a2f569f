"""In what two things differ, in lines. Knows manifests, identities and verdicts by what they say; loads no model."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvouch.artefact.files import parse_object
from kvouch.artefact.manifest import NOT_COMPUTING, FileDifference, Manifest
from kvouch.artefact.manifest import SCHEMA as MANIFEST
from kvouch.digest import canonical_json
from kvouch.errors import FileError, UsageError
from kvouch.identity.identity import SCHEMA as IDENTITY
from kvouch.identity.identity import Identity


def read(path: Path) -> Manifest | Identity | Mapping[str, Any]:
    """A directory's manifest, or what a JSON file holds: a manifest, an identity, or a verdict."""
    if path.is_dir():
        return Manifest.of(path)
    try:
        fields = parse_object(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path}: cannot be read ({error})") from error
    if fields.get("schema") == MANIFEST:
        return Manifest.from_dict(fields, str(path))
    model = fields.get("model")  # as `kvouch info --json` prints it
    record = model.get("identity") if isinstance(model, dict) else fields
    if isinstance(record, dict) and record.get("schema") == IDENTITY:
        return Identity.from_dict(record, str(path))
    for inner in (fields, fields.get("verdict")):  # as --json prints it in an answer
        if isinstance(inner, dict) and "kind" in inner and "reason" in inner:
            return inner
    if "schema" in fields:
        raise FileError(f"{path}: schema {fields['schema']!r}; this kvouch reads {MANIFEST} and {IDENTITY}")
    raise FileError(f"{path}: neither a directory, a manifest, an identity nor a verdict")


def between(a: Path, b: Path) -> list[str]:
    """Lines that say in what the two differ, what matters first; none where nothing does."""
    ours, theirs = read(a), read(b)
    if isinstance(ours, Manifest) and isinstance(theirs, Manifest):
        return [line for one in ours.differences(theirs) for line in [str(one), *_inner(one, a, b)]]
    if isinstance(ours, Identity) and isinstance(theirs, Identity):
        return of_identities(ours, theirs)
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return of_fields(ours, theirs)
    raise UsageError(f"{a} and {b} are not of one kind: give two models, two manifests, two identities or two verdicts")


def _inner(difference: FileDifference, a: Path, b: Path) -> list[str]:
    """The fields of a config in which two directories differ."""
    both = difference.ours is not None and difference.theirs is not None and a.is_dir() and b.is_dir()
    if not both or difference.path not in NOT_COMPUTING:
        return []
    ours, theirs = (parse_object((at / difference.path).read_text("utf-8"), difference.path) for at in (a, b))
    return [f"  {line}" for line in of_fields(ours, theirs)]


def of_identities(ours: Identity, theirs: Identity) -> list[str]:
    """A line a field; of canonical JSON a line an inner field."""
    a, b = ours.to_dict(), theirs.to_dict()
    for fields in (a, b):
        del fields["digest"]
        for name in ("config", "positions"):
            with contextlib.suppress(ValueError):
                fields[name] = json.loads(fields[name])
    return of_fields(a, b)


def of_fields(ours: Mapping[str, Any], theirs: Mapping[str, Any], inside: str = "") -> list[str]:
    """A line a field that differs, objects from the inside."""
    lines: list[str] = []
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        a, b = ours.get(name), theirs.get(name)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += of_fields(a, b, f"{inside}{name}.")
        elif canonical_json(a) != canonical_json(b) or (name in ours) != (name in theirs):
            shown = (json.dumps(one[name], ensure_ascii=False) if name in one else "absent" for one in (ours, theirs))
            lines.append(f"{inside}{name}: {', '.join(shown)}")
    return lines

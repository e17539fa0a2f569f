"""Manifests: every file of an artefact with its size, sha256 and role, and one digest over the files that matter.

Knows names, roles and bytes; knows nothing of models and needs no tensor library. A file without a role in the
computation (README, licence) is listed and left out of the digest; so are the fields of a config that compute nothing.
"""

import json
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, get_args

from kvouch.artefact.files import ArtefactFiles, parse_object
from kvouch.digest import Digest, Sha256, canonical_json
from kvouch.errors import ConfigError, FileError

SCHEMA = "kvouch/manifest/1"
Role = Literal["weights", "config", "tokenizer", "template", "adapter", "other"]
MODEL: tuple[Role, ...] = ("weights", "config", "tokenizer", "template")
MATTERING: tuple[Role, ...] = (*MODEL, "adapter")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ROLES: Mapping[str, Role] = MappingProxyType(
    {
        "config.json": "config",
        "tokenizer.json": "tokenizer",
        "tokenizer_config.json": "template",  # its special tokens are what templates write
        "chat_template.jinja": "template",
        "adapter_config.json": "adapter",
        "adapter_model.safetensors": "adapter",
    }
)
NOT_COMPUTING: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "config.json": frozenset({"_name_or_path", "transformers_version"}),
        "tokenizer_config.json": frozenset({"name_or_path"}),
        "adapter_config.json": frozenset({"base_model_name_or_path"}),
    }
)
"""Fields that say where a file came from: two artefacts that differ in nothing else are the same."""

READERS = 4


@dataclass(frozen=True, kw_only=True)
class ManifestFile:
    """One file: POSIX-relative path, bytes, sha256 of all of them, role, and the digest of what counts in it."""

    path: str
    size: int
    sha256: str
    role: Role
    content: str  # the sha256, or for a config that of its fields that compute

    def to_dict(self) -> dict[str, Any]:
        found = {"path": self.path, "size": self.size, "sha256": self.sha256, "role": self.role}
        return found if self.content == self.sha256 else {**found, "content": self.content}


@dataclass(frozen=True, kw_only=True)
class FileDifference:
    """A path that two manifests say different things of; None where one of them does not have it."""

    path: str
    ours: ManifestFile | None
    theirs: ManifestFile | None

    @property
    def matters(self) -> bool:
        """Whether the computation differs by it."""
        counted = [
            (one.role, one.content) for one in (self.ours, self.theirs) if one is not None and one.role != "other"
        ]
        return len(counted) == 1 or len(set(counted)) > 1

    def __str__(self) -> str:
        end = "" if self.matters else " (no part of the computation)"
        if self.ours is None or self.theirs is None:
            which = "second" if self.ours is None else "first"
            return f"{self.path}: only in the {which}{end}"
        if self.ours.role != self.theirs.role:
            return f"{self.path}: role {self.ours.role}, {self.theirs.role}{end}"
        sizes = f"{self.ours.size:,} and {self.theirs.size:,} bytes"
        return (
            f"{self.path} ({self.ours.role}): sha256 {self.ours.sha256[:12]}, {self.theirs.sha256[:12]}; {sizes}{end}"
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The files of an artefact, in the order of their paths."""

    files: tuple[ManifestFile, ...]

    @classmethod
    def of(cls, directory: str | Path) -> Self:
        """Of a directory, every file read and hashed but those whose names begin with a dot; raises ArtefactError."""
        return cls.of_files(ArtefactFiles(Path(directory)), get_args(Role))

    @classmethod
    def of_files(cls, files: ArtefactFiles, kept: Collection[Role]) -> Self:
        """Of the files of some roles; what was read of them already is not read again."""
        roles = {name: role for name, role in roles_of(files).items() if role in kept}
        with ThreadPoolExecutor(READERS) as pool:
            return cls(files=tuple(pool.map(lambda item: _described(files, *item), roles.items())))

    def part(self, *roles: Role) -> str:
        """One digest over the files of these roles: their paths, roles and contents, in the order of paths."""
        digest = Digest(SCHEMA)
        for file in self.files:
            if file.role in roles:
                digest.texts(file.path, file.role).field(bytes.fromhex(file.content))
        return digest.hex()

    @property
    def digest(self) -> str:
        """One digest over every file that matters."""
        return self.part(*MATTERING)

    def differences(self, other: "Manifest") -> list[FileDifference]:
        """Paths that the two say different things of: what matters first, then by path."""
        ours, theirs = ({file.path: file for file in one.files} for one in (self, other))
        found = [
            FileDifference(path=path, ours=ours.get(path), theirs=theirs.get(path))
            for path in sorted(ours.keys() | theirs.keys())
            if ours.get(path) != theirs.get(path)
        ]
        return sorted(found, key=lambda difference: not difference.matters)

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "digest": self.digest, "files": [file.to_dict() for file in self.files]}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], where: str) -> Self:
        """What `to_dict` gave; FileError where it is of another schema, malformed, or its digest is not its own."""
        if fields.get("schema") != SCHEMA:
            raise FileError(f"{where}: schema {fields.get('schema')!r}; a manifest of schema {SCHEMA} is needed")
        try:
            files = tuple(_parsed(entry) for entry in fields["files"])
            found = cls(files=files)
            if found.digest != fields["digest"] or [f.path for f in files] != sorted({f.path for f in files}):
                raise ValueError("its digest is not that of its files, or their paths are not in order")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FileError(
                f"{where}: not a whole manifest ({error}); write it again with `kvouch manifest`"
            ) from error
        return found

    @classmethod
    def read(cls, path: Path) -> Self:
        """A manifest that `kvouch manifest --json` wrote."""
        try:
            text = path.read_text("utf-8")
        except (OSError, ValueError) as error:
            raise FileError(f"{path}: cannot be read ({error})") from error
        return cls.from_dict(parse_object(text, str(path)), str(path))


def roles_of(files: ArtefactFiles) -> dict[str, Role]:
    """Every file by name, with what it is for."""
    weights = set(weight_files(files))
    return {name: "weights" if name in weights else ROLES.get(name, "other") for name in files.names()}


def weight_files(files: ArtefactFiles) -> list[str]:
    """The safetensors files that hold a model's tensors; the index names them where there are several."""
    if files.exists(SINGLE):
        return [SINGLE]
    if not files.exists(INDEX):
        return []
    weight_map = files.json(INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(f"{files.directory / INDEX}: weight_map must map tensor names to file names")
    names = set(weight_map.values())
    if unknown := sorted(names - set(files.names())):
        raise ConfigError(f"{files.directory / INDEX}: weight_map names {unknown[:3]}: no such files here")
    return sorted(names)


def _described(files: ArtefactFiles, name: str, role: Role) -> ManifestFile:
    fields = files.json(name) if name in NOT_COMPUTING else None
    record = files.record(name)
    content = record.sha256
    if fields is not None:
        counted = {field: value for field, value in fields.items() if field not in NOT_COMPUTING[name]}
        content = Sha256().update(canonical_json(counted).encode("utf-8", "surrogatepass")).hex()
    return ManifestFile(path=name, size=record.size, sha256=record.sha256, role=role, content=content)


def _parsed(entry: Mapping[str, Any]) -> ManifestFile:
    file = ManifestFile(**{"content": entry["sha256"], **entry})
    texts = (file.path, file.sha256, file.content)
    hashes = all(len(bytes.fromhex(text)) == 32 for text in texts[1:])
    if not (all(isinstance(text, str) for text in texts) and hashes and type(file.size) is int):
        raise ValueError(f"the entry of {file.path!r} is malformed")
    if file.role not in get_args(Role):
        raise ValueError(f"{file.path}: role {file.role!r}")
    return file


def dumps(manifest: Manifest) -> str:
    """The JSON of a manifest, a file a line."""
    head = manifest.to_dict()
    lines = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in head.pop("files"))
    return f'{json.dumps(head)[:-1]}, "files": [\n  {lines}\n]}}\n'

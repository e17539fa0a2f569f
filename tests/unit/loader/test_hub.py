"""A hub repository as plain files, without a network: the hub is a fake, or the client's functions are replaced."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.utils.tqdm import are_progress_bars_disabled

from kvouch.digest import sha256_stream
from kvouch.errors import DownloadError
from kvouch.loader.catalogue import HubSource
from kvouch.loader.hub import HubFile, HuggingFaceHub, Listing, take_snapshot

COMMIT = "a" * 40
SOURCE = HubSource(repository="owner/name")
CONTENTS = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"hello",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickle",
    "tokenizer.model": b"pieces",
    "README.md": b"read me",
    "modeling.py": b"code",
    "onnx/config.json": b"{}",
}
TAKEN = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}


class FakeHub:
    """Serves CONTENTS; leaves a `.cache` folder as the real client does."""

    endpoint = "https://hub.invalid"

    def __init__(self, contents: dict[str, bytes] = CONTENTS, arriving: dict[str, bytes] | None = None) -> None:
        self.contents = contents
        self.arriving = contents if arriving is None else arriving
        self.copied: list[str] = []

    def look_up(self, repository: str, revision: str) -> Listing:
        files = tuple(
            HubFile(
                name=name,
                size_bytes=len(content),
                sha256=sha256_stream([content]) if name.endswith(".safetensors") else None,
            )
            for name, content in self.contents.items()
        )
        return Listing(commit=COMMIT, files=files)

    def copy(self, repository: str, commit: str, names: Sequence[str], into: Path) -> None:
        assert commit == COMMIT
        self.copied += names
        (into / ".cache" / "huggingface").mkdir(parents=True)
        for name in names:
            if name in self.arriving:
                (into / name).write_bytes(self.arriving[name])


def nothing(stage: str, done: int, total: int) -> None:
    pass


def test_only_plain_top_level_files_are_taken_and_the_commit_is_told(tmp_path: Path) -> None:
    hub = FakeHub()
    assert take_snapshot(SOURCE, tmp_path, nothing, hub) == COMMIT
    assert {path.name for path in tmp_path.iterdir()} == set(hub.copied) == TAKEN


def test_progress_counts_bytes_up_to_the_total(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    take_snapshot(SOURCE, tmp_path, lambda *told: seen.append(told), FakeHub())
    total = sum(len(CONTENTS[name]) for name in TAKEN)
    assert seen[0] == ("download", 0, total)
    assert ("download", total, total) in seen
    assert seen[-1] == ("verify", len(TAKEN), len(TAKEN))


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_repository_without_what_is_needed_is_refused_before_the_copy(tmp_path: Path, missing: str) -> None:
    hub = FakeHub({name: content for name, content in CONTENTS.items() if name != missing})
    with pytest.raises(DownloadError, match=missing.removeprefix("model")):
        take_snapshot(SOURCE, tmp_path, nothing, hub)
    assert hub.copied == []


@pytest.mark.parametrize(
    ("arriving", "reason"),
    [
        ({**CONTENTS, "model.safetensors": b"WEIGHTS"}, "model.safetensors is not what the hub lists"),
        ({**CONTENTS, "config.json": b"{"}, "config.json has 1 bytes, not 2"),
        ({name: CONTENTS[name] for name in TAKEN - {"config.json"}}, "config.json did not arrive"),
    ],
)
def test_what_arrives_is_checked(tmp_path: Path, arriving: dict[str, bytes], reason: str) -> None:
    with pytest.raises(DownloadError, match=reason):
        take_snapshot(SOURCE, tmp_path, nothing, FakeHub(arriving=arriving))


def test_another_commit_than_the_pinned_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="another commit than bbbb"):
        take_snapshot(HubSource(repository="owner/name", revision="b" * 40), tmp_path, nothing, FakeHub())


class UnreachableError(Exception):
    """Like the client's own network errors, no OSError."""


@pytest.mark.parametrize(("step", "attempt"), [("look_up", "look up owner/name at main"), ("copy", f"at {COMMIT}")])
def test_a_failure_says_what_was_tried_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step: str, attempt: str
) -> None:
    def fail(*arguments: object) -> None:
        raise UnreachableError("Name or service not known\nlong advice")

    hub = FakeHub()
    monkeypatch.setattr(hub, step, fail)
    with pytest.raises(DownloadError) as caught:
        take_snapshot(SOURCE, tmp_path, nothing, hub)
    text = str(caught.value)
    assert "https://hub.invalid" in text
    assert attempt in text
    assert text.endswith("UnreachableError: Name or service not known")


def test_the_client_is_asked_for_the_commit_and_the_names_with_its_bars_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, object] = {}

    def snapshot_download(repository: str, **options: object) -> None:
        asked.update(options, repository=repository, quiet=are_progress_bars_disabled())

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    were_disabled = are_progress_bars_disabled()
    HuggingFaceHub().copy("owner/name", COMMIT, ["config.json"], tmp_path)
    assert asked == {
        "repository": "owner/name",
        "revision": COMMIT,
        "local_dir": tmp_path,
        "allow_patterns": ["config.json"],
        "quiet": True,
    }
    assert are_progress_bars_disabled() == were_disabled


def test_the_clients_listing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = [
        SimpleNamespace(rfilename="config.json", size=2, lfs=None),
        SimpleNamespace(rfilename="model.safetensors", size=7, lfs=SimpleNamespace(sha256="c" * 64)),
    ]
    monkeypatch.setattr(
        huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(sha=COMMIT, siblings=siblings)
    )
    assert HuggingFaceHub().look_up("owner/name", "main") == Listing(
        commit=COMMIT,
        files=(
            HubFile(name="config.json", size_bytes=2),
            HubFile(name="model.safetensors", size_bytes=7, sha256="c" * 64),
        ),
    )

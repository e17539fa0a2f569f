"""Names and what they stand for."""

import pytest

from kvouch.errors import UnknownModel
from kvouch.loader.catalogue import CATALOGUE, HubSource, WheelSource, find

COMMIT = "12fd25f77366fa6b3b4b768ec3050bf629380bac"


def test_every_name_finds_its_own_entry_and_folder() -> None:
    assert [find(entry.name) for entry in CATALOGUE] == list(CATALOGUE)
    assert len({entry.folder for entry in CATALOGUE}) == len(CATALOGUE)


def test_the_wheel_pins_every_digest() -> None:
    source = find("smollm2-135m-instruct-q4_1").source
    assert isinstance(source, WheelSource)
    digests = [value for field, value in source.pins.items() if field != "member"]
    assert len(digests) == 3
    assert all(len(digest) == 64 and set(digest) <= set("0123456789abcdef") for digest in digests)


def test_the_hub_entry_pins_a_commit() -> None:
    assert find("smollm2-135m-instruct").source.pins == {"revision": COMMIT}


@pytest.mark.parametrize(
    ("name", "revision", "folder"),
    [
        ("owner/name", "main", "owner--name"),
        ("owner/name@v1.0", "v1.0", "owner--name@v1.0"),
        ("owner/name@refs/pr/1", "refs/pr/1", "owner--name@refs--pr--1"),
        (f"owner/name@{COMMIT}", COMMIT, f"owner--name@{COMMIT}"),
    ],
)
def test_a_hub_id_is_an_entry_whose_folder_is_one_component(name: str, revision: str, folder: str) -> None:
    entry = find(name)
    assert entry.source == HubSource(repository="owner/name", revision=revision)
    assert entry.folder == folder


@pytest.mark.parametrize("name", ["", "nonsense", "a/b/c", "../up", "./here", "owner/", "owner/name@", "owner/na me"])
def test_anything_else_is_unknown_and_the_error_lists_the_catalogue(name: str) -> None:
    with pytest.raises(UnknownModel, match=r"smollm2-135m-instruct-q4_1, smollm2-135m-instruct\).*owner/name"):
        find(name)

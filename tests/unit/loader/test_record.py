"""The record of a pull."""

import json
from pathlib import Path

import pytest

from kvouch.errors import FileError
from kvouch.loader.record import RECORD_FILE, SCHEMA, Record, read_record, write_record

RECORD = Record(name="owner/name", source="hub:owner/name", pins={"revision": "main"})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    write_record(tmp_path, RECORD)
    assert read_record(tmp_path) == RECORD


def test_a_folder_without_one_is_not_a_pulled_model(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"no kvouch\.json.*move it away"):
        read_record(tmp_path)


GOOD = {"schema": SCHEMA, "name": "a", "source": "b", "pins": {}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not a record"),
        ("[]", "schema"),
        (json.dumps(GOOD | {"schema": "kvouch/pulled-model/2"}), "schema"),
        (json.dumps(GOOD | {"extra": 1}), "extra"),
        (json.dumps({field: value for field, value in GOOD.items() if field != "pins"}), "fields"),
        (json.dumps(GOOD | {"pins": {"revision": 3}}), "every pin must be text"),
        (json.dumps(GOOD | {"pins": []}), "every pin must be text"),
    ],
)
def test_a_damaged_one_is_named(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / RECORD_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(FileError, match=f"kvouch.json.*{reason}.*pull again"):
        read_record(tmp_path)

"""The record of a pull, `kvouch.json`. Knows what was pulled and from where; knows nothing of how to pull it.

A folder is a pulled model when it holds this file, and it is written last, before the folder gets its name.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvouch.errors import FileError

RECORD_FILE = "kvouch.json"
SCHEMA = "kvouch/pulled-model/1"
FIELDS = ("schema", "name", "source", "pins")


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a folder holds: a name, a source, and the revision or digests that were checked."""

    name: str
    source: str
    pins: Mapping[str, str]


def write_record(folder: Path, record: Record) -> None:
    """Makes a folder a pulled model."""
    fields = {"schema": SCHEMA, **asdict(record)}
    (folder / RECORD_FILE).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def read_record(folder: Path) -> Record:
    """The record of a pulled folder; FileError where it is missing or is not one, with what to do."""
    path = folder / RECORD_FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileError(f"{folder}: no {RECORD_FILE}, so not a pulled model; move it away and pull again") from None
    except (OSError, ValueError) as error:
        raise _broken(path, str(error)) from None
    _check_fields(path, fields)
    return Record(name=fields["name"], source=fields["source"], pins=fields["pins"])


def _check_fields(path: Path, fields: Any) -> None:
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise _broken(path, f"its schema is not {SCHEMA}")
    if set(fields) != set(FIELDS):
        raise _broken(path, f"its fields are {sorted(fields)}, not {sorted(FIELDS)}")
    pins = fields["pins"]
    texts = [fields["name"], fields["source"], *(pins.values() if isinstance(pins, dict) else [None])]
    if not all(isinstance(text, str) for text in texts):
        raise _broken(path, "name, source and every pin must be text")


def _broken(path: Path, reason: str) -> FileError:
    return FileError(f"{path}: not a record that this kvouch reads ({reason}); delete {path.parent} and pull again")

"""Safetensors files, read once into private memory. Knows the format and bytes; knows nothing of models.

The library maps the file, and a mapped file that changes on disk changes the model in silence. Here each tensor is read
into memory of its own, in file order. Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a
JSON header, then the numbers, without holes).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvouch.artefact.files import parse_object
from kvouch.artefact.reading import HashedFile
from kvouch.errors import ConfigError, FileError

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

MOST_NUMBERS = 2**59
"""More than a tensor can have: torch counts its bytes in 63 bits."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor of a header: numbers at [start, stop) after the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def read_safetensors(file: HashedFile) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors in file order; FileError where the file is truncated or its header contradicts it."""
    for entry in _read_header(file):
        yield entry.name, _read_tensor(file, entry)


def _read_header(file: HashedFile) -> list[TensorEntry]:
    path, size = file.path, file.size
    length = int.from_bytes(file.read(8), "little") if size >= 8 else size
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise FileError(f"{path}: no safetensors header in {size} bytes; the file is truncated or of another kind")
    try:
        header = parse_object(file.read(length).decode("utf-8"), f"{path} (header)")
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: the header is not UTF-8; the file is of another kind") from error
    except ConfigError as error:
        raise FileError(str(error)) from error
    header.pop("__metadata__", None)
    entries = sorted((_entry(name, fields, path) for name, fields in header.items()), key=lambda e: (e.start, e.stop))
    end = 0
    for entry in entries:
        if entry.start != end:
            raise FileError(f"{path}: tensor {entry.name} starts at byte {entry.start}, {end} is expected")
        end = entry.stop
    if 8 + length + end != size:
        raise FileError(
            f"{path}: {size} bytes on disk, {8 + length + end} by its header; the file is truncated or padded"
        )
    return entries


def _entry(name: str, fields: Any, path: Path) -> TensorEntry:
    try:
        dtype, shape, (start, stop) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        whole = all(type(number) is int and 0 <= number < MOST_NUMBERS for number in (*shape, start, stop))
    except (TypeError, KeyError, ValueError) as error:
        raise FileError(f"{path}: the header's entry for tensor {name} is malformed") from error
    if not whole or not isinstance(dtype, str) or dtype not in DTYPES or _volume(shape) >= MOST_NUMBERS:
        raise FileError(
            f"{path}: tensor {name} has dtype {dtype}, shape {shape}, bytes [{start}, {stop}): not supported"
        )
    if stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise FileError(f"{path}: tensor {name} of shape {shape} and dtype {dtype} cannot have {stop - start} bytes")
    return TensorEntry(name=name, dtype=DTYPES[dtype], shape=shape, start=start, stop=stop)


def _volume(shape: tuple[int, ...]) -> int:
    """Numbers of a shape as torch bounds them: an empty dimension does not make the others small."""
    return math.prod(max(size, 1) for size in shape)


def _read_tensor(file: HashedFile, entry: TensorEntry) -> Tensor:
    tensor = torch.empty(entry.shape, dtype=entry.dtype)
    if tensor.numel():
        file.readinto(tensor.flatten().view(torch.uint8).numpy().data.cast("B"))
    return tensor

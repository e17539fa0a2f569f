"""Safetensors files: read as the library reads them, and one FileError for whatever else is in them."""

import contextlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from kvouch.artefact.files import ArtefactFiles
from kvouch.errors import FileError
from kvouch.loader.safetensors import DTYPES, read_safetensors
from kvouch.numerics.bits import same_bits

TENSORS = {
    "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.tensor([True, False, True]),
    "nothing": torch.empty(0, 5, dtype=torch.bfloat16),
    "one": torch.tensor(-0.0, dtype=torch.float64),
}


def read(path: Path) -> dict[str, Tensor]:
    with ArtefactFiles(path.parent).open(path.name) as file:
        return dict(read_safetensors(file))


def read_while(file: Path, happens: Callable[[], None]) -> None:
    """Reads a file; behind its first tensor something happens to it."""
    with ArtefactFiles(file.parent).open(file.name) as opened:
        tensors = read_safetensors(opened)
        next(tensors)
        happens()
        list(tensors)


def same_tensors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(same_bits(found[name], wanted[name]) for name in wanted)


def raw(header: Any, numbers: bytes = b"", *, length: int | None = None) -> bytes:
    """The bytes of a file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + numbers


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def refused(file: Path, content: bytes, reason: str) -> None:
    file.write_bytes(content)
    with pytest.raises(FileError, match=reason) as caught:
        read(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (2, 3), (1, 1, 1, 5), (7,)], ids=str)
def test_contents_are_those_that_the_library_reads(file: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = max(math.prod(shape) * dtype.itemsize, dtype.itemsize)
    numbers = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    if dtype == torch.bool:
        numbers = numbers % 2
    numbers = numbers.view(dtype)[: math.prod(shape)].view(shape)  # any bits, NaN among them
    safetensors.torch.save_file({"x": numbers, "y": torch.ones(3)}, file)
    assert same_tensors(read(file), safetensors.torch.load_file(file))
    assert same_bits(read(file)["x"], numbers)


def test_tensors_come_in_the_order_of_the_file(file: Path) -> None:
    header = {"z": entry(offsets=(0, 4)), "a": entry(offsets=(8, 12)), "m": entry(offsets=(4, 8))}
    file.write_bytes(raw(header, torch.tensor([1.0, 2.0, 3.0]).numpy().tobytes()))
    assert [(name, tensor.item()) for name, tensor in read(file).items()] == [("z", 1.0), ("m", 2.0), ("a", 3.0)]


def test_a_file_without_tensors_and_metadata_are_read(file: Path) -> None:
    file.write_bytes(raw({"__metadata__": {"format": "pt"}}))
    assert read(file) == {}
    safetensors.torch.save_file(TENSORS, file, metadata={"format": "pt", "other": "x"})
    assert same_tensors(read(file), TENSORS)


def test_tensors_are_private_memory(file: Path) -> None:
    """A mapped file that changes on the disk would change the model."""
    safetensors.torch.save_file(TENSORS, file)
    found = read(file)
    with file.open("r+b") as handle:
        handle.write(b"\xff" * file.stat().st_size)
    assert same_tensors(found, TENSORS)
    found["a.weight"].zero_()
    assert same_tensors({name: found[name] for name in ("b", "one")}, {name: TENSORS[name] for name in ("b", "one")})
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values() if tensor.numel()}) == 3


def test_every_truncation_is_refused(file: Path) -> None:
    safetensors.torch.save_file(TENSORS, file, metadata={"format": "pt"})
    whole = file.read_bytes()
    for length in range(len(whole)):
        refused(file, whole[:length], "truncated" if length else "half-written")
    file.write_bytes(whole)
    assert same_tensors(read(file), TENSORS)


def test_a_file_that_shrinks_while_it_is_read_is_refused(file: Path) -> None:
    """With the header and a tensor read, the rest is cut off."""
    safetensors.torch.save_file({"a": torch.ones(4), "b": torch.ones(100_000)}, file)
    with pytest.raises(FileError, match="ended at byte 200000"):
        read_while(file, lambda: os.truncate(file, 200_000))


def test_a_file_that_is_written_to_while_it_is_read_is_refused(file: Path) -> None:
    safetensors.torch.save_file({"a": torch.ones(4), "b": torch.ones(100_000)}, file)
    with pytest.raises(FileError, match="changed while it was read"):
        read_while(file, lambda: os.utime(file, ns=(1, 1)))


def test_what_is_padded_or_joined_is_refused(file: Path) -> None:
    safetensors.torch.save_file(TENSORS, file)
    whole = file.read_bytes()
    for more in (b"\0", b"\0" * 4096, whole):
        refused(file, whole + more, f"{len(whole + more)} bytes on disk, {len(whole)} by its header")


@pytest.mark.parametrize("length", [3, 10**6, 2**62, 2**64 - 1])
def test_a_header_longer_than_the_file_is_refused(file: Path, length: int) -> None:
    refused(file, raw({}, length=length), "no safetensors header in 10 bytes")


def test_the_header_has_a_limit(file: Path) -> None:
    with file.open("wb") as handle:  # sparse: takes no room
        handle.write((100_000_001).to_bytes(8, "little"))
        handle.truncate(200_000_000)
    with pytest.raises(FileError, match="no safetensors header"):
        read(file)


def test_another_kind_of_file_is_refused(file: Path) -> None:
    torch.save({"a": torch.ones(2)}, file)  # a zip with a pickle in it
    refused(file, file.read_bytes(), "another kind")
    refused(file, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "another kind")
    refused(file, raw(b"\xff\xfe{}"), "the header is not UTF-8")
    refused(file, raw(b"[]"), "a JSON object is needed")
    refused(file, raw(b"{} {}"), "not JSON")
    refused(file, raw(b'{"a":' * 50_000), "not JSON")


def test_a_missing_file_and_a_directory(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none", "cannot be read .*No such file"), (tmp_path, "not a regular file")):
        with pytest.raises(FileError, match=f"{path}: {reason}"):
            read(path)


def test_a_name_that_comes_twice_is_refused(file: Path) -> None:
    one = json.dumps(entry())[1:-1]
    refused(file, raw(f'{{"a": {{{one}}}, "a": {{{one}}}}}'.encode(), b"1234"), r"repeated fields \['a'\]")
    refused(file, raw(f'{{"a": {{{one}, "dtype": "I32"}}}}'.encode(), b"1234"), r"repeated fields \['dtype'\]")


OFFSETS = {
    "a gap before": [(4, 8)],
    "a gap between": [(0, 4), (8, 12)],
    "an overlap": [(0, 4), (2, 6)],
    "the same bytes twice": [(0, 4), (0, 4)],
}


@pytest.mark.parametrize("case", OFFSETS)
def test_bytes_belong_to_one_tensor_each(file: Path, case: str) -> None:
    """The library refuses the same files."""
    offsets = OFFSETS[case]
    header = {f"t{index}": entry(offsets=pair) for index, pair in enumerate(offsets)}
    content = raw(header, b"\0" * max(stop for _, stop in offsets))
    refused(file, content, r"tensor t\d starts at byte \d, \d is expected")
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load(content)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (entry(shape=(2,)), r"shape \(2,\) and dtype F32 cannot have 4 bytes"),
        (entry(shape=(0,)), "cannot have 4 bytes"),
        (entry(shape=()), ""),
        (entry(dtype="F16"), "cannot have 4 bytes"),
        (entry(offsets=(4, 0), shape=(0,)), "cannot have -4 bytes"),
        (entry(shape=(2**64, 0), offsets=(0, 0)), "not supported"),
        (entry(shape=(2**63, 0), offsets=(0, 0)), "not supported"),
        (entry(shape=(2**40, 2**40, 0), offsets=(0, 0)), "not supported"),
        (entry(shape=(10**300, 10**300)), "not supported"),
        (entry(shape=(2**40,), offsets=(0, 2**42)), "bytes on disk"),
        (entry(dtype="F8_E4M3"), "dtype F8_E4M3.*not supported"),
        (entry(dtype="f32"), "dtype f32.*not supported"),
        (entry(dtype=["F32"]), "not supported"),
        (entry(dtype=None), "not supported"),
        (entry(shape=(-1, -1)), "not supported"),
        (entry(shape=(True,)), "not supported"),
        (entry(shape=(1.0,)), "not supported"),
        (entry(shape="1"), "not supported"),
        (entry(shape=None), "malformed"),
        (entry(shape=3), "malformed"),
        (entry(offsets=(-4, 0)), "not supported"),
        (entry(offsets=(False, 4)), "not supported"),
        (entry(offsets=(0, 4, 4)), "malformed"),
        (entry(offsets=None), "malformed"),
        (entry(offsets="04"), "not supported"),
        ({"dtype": "F32", "shape": [1]}, "malformed"),
        ({}, "malformed"),
        ([], "malformed"),
        ("F32", "malformed"),
        (None, "malformed"),
        (7, "malformed"),
    ],
)
def test_entries_that_make_no_sense_are_refused(file: Path, fields: Any, reason: str) -> None:
    content = raw({"the_name": fields}, b"1234")
    if not reason:
        file.write_bytes(content)
        assert read(file)["the_name"].shape == ()
        return
    refused(file, content, reason)
    with pytest.raises(FileError, match=r"the_name|by its header"):
        read(file)


SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda name: name != "__metadata__")


@st.composite
def any_tensor(draw: st.DrawFn) -> Tensor:
    """Any dtype, a small shape, any bits."""
    dtype, shape = draw(st.sampled_from(list(DTYPES.values()))), draw(SHAPES)
    size = math.prod(shape) * dtype.itemsize
    numbers = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        numbers = bytes(number % 2 for number in numbers)
    if not numbers:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(numbers), dtype=dtype).view(shape)


QUIET = [HealthCheck.function_scoped_fixture]


@settings(max_examples=60, deadline=None, suppress_health_check=QUIET)
@given(tensors=st.dictionaries(NAMES, any_tensor(), max_size=5))
def test_what_the_library_writes_is_read_back(file: Path, tensors: dict[str, Tensor]) -> None:
    safetensors.torch.save_file(tensors, file)
    assert same_tensors(read(file), tensors)


def test_a_flipped_byte_is_refused_or_stays_consistent(file: Path) -> None:
    """Every byte of the header: each of its bits, and a few characters that mean something.

    A format without a checksum cannot refuse all of them ("x" may become "y"). What it does accept must be a header
    that fits the file: all of its bytes, in order, and the very tensors that the library reads where it reads it.
    """
    header = {"x": entry(shape=(2, 3), offsets=(0, 24)), "y": entry("F16", (12,), (24, 48))}
    numbers = bytes(range(1, 49))
    whole = raw(header, numbers)
    accepted = 0
    for position in range(len(whole) - len(numbers)):
        flips = {whole[position] ^ 1 << bit for bit in range(8)}
        for value in flips | set(b'09"]') - {whole[position]}:
            content = whole[:position] + bytes([value]) + whole[position + 1 :]
            file.write_bytes(content)
            try:
                found = read(file)
            except FileError:
                continue
            accepted += 1
            assert sum(tensor.nbytes for tensor in found.values()) == len(numbers)
            stored = b"".join(
                tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for tensor in found.values()
            )
            assert stored == numbers
            try:
                theirs = safetensors.torch.load(content)
            except safetensors.SafetensorError:
                continue
            assert same_tensors(found, theirs)
    assert accepted  # renamed tensors, at least


@settings(max_examples=100, deadline=None, suppress_health_check=QUIET)
@given(content=st.binary(max_size=40), header=st.booleans())
def test_noise_is_refused_in_one_way(file: Path, content: bytes, header: bool) -> None:
    file.write_bytes(raw(content) if header else content)
    with contextlib.suppress(FileError):
        assert read(file) == {}


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2**65) | st.floats() | st.sampled_from(["F32", "I8", "", "x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["dtype", "shape"]), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None, suppress_health_check=QUIET)
@given(dtype=JSON_VALUES, shape=JSON_VALUES, offsets=JSON_VALUES)
def test_any_json_in_an_entry_gives_a_file_error_or_a_tensor(file: Path, dtype: Any, shape: Any, offsets: Any) -> None:
    file.write_bytes(raw({"a": entry(dtype, shape, offsets)}, b"\0" * 4))
    try:
        found = read(file)
    except FileError:
        return
    assert found["a"].nbytes == 4

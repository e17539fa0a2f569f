"""One digest over the tensors of a safetensors file. Knows names, dtypes, shapes and bytes; needs no tensor library.

The order of the tensors in the file, its metadata and its padding do not count.
"""

import json
import mmap
from pathlib import Path

from kvouch.digest import Digest
from kvouch.errors import FileError

DOMAIN = "kvouch/tensors/1"
LENGTH_BYTES = 8  # a safetensors file: the header's length, the header in JSON, the bytes of the tensors


def tensors_digest(path: Path) -> str:
    """sha256 in hex over each tensor in the order of names: name, dtype, shape (64-bit integers), bytes as stored."""
    digest = Digest(DOMAIN)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header_bytes = int.from_bytes(data[:LENGTH_BYTES], "little")
            start = LENGTH_BYTES + header_bytes
            header = json.loads(data[LENGTH_BYTES:start])
            for name in sorted(header.keys() - {"__metadata__"}):
                tensor = header[name]
                begin, end = (start + offset for offset in tensor["data_offsets"])
                if end > len(data):
                    raise ValueError(f"truncated inside {name}")
                digest.field(name.encode()).field(tensor["dtype"].encode())
                digest.field(b"".join(size.to_bytes(8, "little") for size in tensor["shape"]))
                digest.field(data[begin:end])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileError(f"{path}: not a readable safetensors file ({error}); pull or copy it again") from None
    return digest.hex()

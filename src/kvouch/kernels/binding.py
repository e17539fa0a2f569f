"""The compiled step's library as Python sees it: its structs, which variants run here, and packing.

Knows pointers and layouts; knows nothing of models' files, identities or caches. `step.h` says what each field means.
"""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kvouch.cache.blocks import numbers_together
from kvouch.contract import BLOCK

LIBRARY = Path(__file__).parent / "step.so"
LARGEST_HEAD = 256
DONE, CANCELLED, NONFINITE = range(3)

Variant = Literal["avx2", "avx512", "avx512_bf16"]
VARIANTS: tuple[Variant, ...] = ("avx2", "avx512", "avx512_bf16")
NAMES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
NUMBERS = {dtype: number for number, dtype in enumerate(NAMES)}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}

Watcher = ctypes.CFUNCTYPE(c_int32, c_int32)


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class Lora(Structure):
    """`kv_lora`: one correction of a slice of outputs."""

    _fields_ = (*_fields(c_void_p, "a b"), *_fields(c_int32, "rank start outputs"), ("scale", c_float))


class Product(Structure):
    """`kv_linear`: one matrix product."""

    _fields_ = (
        *_fields(c_void_p, "weight bias"),
        ("corrections", POINTER(Lora)),
        *_fields(c_int32, "inputs outputs num_corrections unused"),
    )


class Layer(Structure):
    """`kv_layer`: the tensors of a layer."""

    _fields_ = (
        *_fields(c_void_p, "attention_gain attention_bias query_gain key_gain mlp_gain mlp_bias"),
        *_fields(Product, "qkv output up down"),
    )


class Network(Structure):
    """`kv_model`: the tensors and sizes of a model."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        *_fields(c_void_p, "embedding positions cosines sines final_gain final_bias"),
        ("head", Product),
        *_fields(c_int32, "num_layers hidden heads kv_heads head_dim inner activation gated tied"),
        ("eps", c_float),
    )


class Planes(Structure):
    """`kv_planes`: where keys and values lie."""

    _fields_ = (("blocks", c_void_p), *_fields(c_int64, "layer_stride kind_stride head_stride"))


class Sequence(Structure):
    """`kv_sequence`: the rows of one sequence."""

    _fields_ = (
        ("model", POINTER(Network)),
        ("table", c_void_p),
        *_fields(c_int32, "first rows scored broken"),
    )


class Call(Structure):
    """`kv_call`: one step."""

    _fields_ = (
        ("planes", Planes),
        ("sequences", POINTER(Sequence)),
        *_fields(c_void_p, "ids scores scratch"),
        ("watcher", Watcher),
        *_fields(c_int32, "num_sequences threads"),
    )


STRUCTS = (Lora, Product, Layer, Network, Planes, Sequence, Call)


class Library:
    """A library that was built for this processor and these structs, and the variants that run here."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where the file is missing, of another system, or of another build than these structs."""
        self._library = library = ctypes.CDLL(str(path))
        try:
            library.kv_sources.restype = library.kv_build.restype = c_char_p
            self.sources, self.build = library.kv_sources().decode(), library.kv_build().decode()
            sizes = (c_int32 * len(STRUCTS))()
            library.kv_struct_bytes(sizes)
        except AttributeError as error:
            raise OSError(f"{path} is no library of kvouch ({error})") from None
        if list(sizes) != [ctypes.sizeof(one) for one in STRUCTS]:
            raise OSError(f"{path} was built from other sources: install kvouch again")
        library.kv_pack.argtypes = (c_void_p, c_void_p, *[c_int32] * 4)
        library.kv_pack.restype = None
        runs = library.kv_variants()
        self.variants = tuple(name for bit, name in enumerate(VARIANTS) if runs >> bit & 1)

    def best(self, dtype: torch.dtype) -> Variant | None:
        """The fastest variant for a dtype here."""
        able = [name for name in self.variants if has_step(name, dtype)]
        return able[-1] if able else None

    def step(self, variant: Variant, dtype: torch.dtype) -> Any:
        """`int step(Call *)`: DONE, CANCELLED or NONFINITE."""
        function = self._function("step", variant, dtype)
        function.argtypes, function.restype = (POINTER(Call),), c_int32
        return function

    def scratch(self, variant: Variant, dtype: torch.dtype) -> Any:
        """`size_t scratch(Call *)`: the bytes of scratch that a call needs."""
        function = self._function("scratch", variant, dtype)
        function.argtypes, function.restype = (POINTER(Call),), c_size_t
        return function

    def multiply(self, variant: Variant, dtype: torch.dtype, product: Product, x: Tensor, threads: int) -> Tensor:
        """Float32 [R, padded N] of rows x, float32 [R, padded K]."""
        rows, y = len(x), x.new_empty(len(x), -(-product.outputs // BLOCK) * BLOCK)
        rounded = torch.empty_like(x)
        function = self._function("product", variant, dtype)
        function.argtypes = (POINTER(Product), c_void_p, c_void_p, c_void_p, c_int32, c_int32)
        function.restype = None
        function(ctypes.byref(product), pointer(x), pointer(rounded), pointer(y), rows, threads)
        return y

    def pack(self, weight: Tensor) -> Tensor:
        """A weight [N, K] as the step reads it; by as many threads as torch has."""
        outputs, inputs = weight.shape
        plain, packed = (
            weight.contiguous(),
            torch.empty(packed_shape(outputs, inputs, weight.dtype), dtype=weight.dtype),
        )
        number, threads = NUMBERS[weight.dtype], torch.get_num_threads()
        self._library.kv_pack(pointer(plain), pointer(packed), outputs, inputs, number, threads)
        return packed

    def _function(self, what: str, variant: Variant, dtype: torch.dtype) -> Any:
        return getattr(self._library, f"kv_{what}_{variant}_{NAMES[dtype]}")


def packed_shape(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[int, ...]:
    """[N/16, K/2, 16, 2] in bfloat16, [N/16, K, 16] otherwise; rounded up."""
    together = numbers_together(dtype)
    shape = (-(-outputs // BLOCK), -(-inputs // together), BLOCK)
    return shape if together == 1 else (*shape, together)


def unpack(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """The plain weight [N, K] of a packed one."""
    pairs = packed if packed.dim() == 4 else packed[..., None]
    return pairs.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:outputs, :inputs].contiguous()


def has_step(variant: Variant, dtype: torch.dtype) -> bool:
    """Whether a variant was made for a dtype."""
    return dtype == torch.bfloat16 if variant == "avx512_bf16" else dtype in NAMES


def pointer(tensor: Tensor | None) -> int | None:
    """Where a contiguous tensor's numbers begin."""
    return None if tensor is None else tensor.data_ptr()


@cache
def library() -> Library | str:
    """The library of this installation, or why there is none."""
    if not LIBRARY.exists():
        return "no compiled step was built when kvouch was installed: it takes a C compiler and an x86-64 processor"
    try:
        found = Library(LIBRARY)
    except OSError as error:
        return f"the compiled step cannot be used: {error}"
    return found if found.variants else "this processor has no AVX2 with FMA and F16C, which the compiled step needs"

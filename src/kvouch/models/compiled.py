"""The compiled step as a path: weights packed for its kernels, and one call for all layers of a step.

Knows packed weights and the library's structs; knows no file. What is computed is described in `kernels/forward.c`.
"""

import ctypes
from collections.abc import Generator, Sequence
from threading import RLock
from typing import Any

import torch
from torch import Tensor

from kvouch.cache.blocks import BlockCache, BlockedCache, Layout, whole_blocks
from kvouch.contract import KVCache, LayerWatch, Rows
from kvouch.errors import CacheShapeError, UsageError
from kvouch.kernels import binding
from kvouch.kernels.binding import Library, Variant, pointer
from kvouch.models.config import ModelConfig
from kvouch.models.linear import Linear
from kvouch.models.network import Bound
from kvouch.models.step import Chunk, ModelWeights, nonfinite

ALIGNMENT = 64  # of the scratch: a cache line
INTERRUPTIBLE_ROWS = 16  # a shorter step is over before anyone can want to stop it


class StepLinear:
    """A weight in the layout that the compiled step reads; its bias in float32, padded with zeros."""

    least_rows = 1

    def __init__(self, path: "CompiledPath", weight: Tensor, bias: Tensor | None) -> None:
        self._path = path
        self.outputs, self.inputs = weight.shape
        self.weight = path.library.pack(weight)
        self.bias = None
        if bias is not None:
            self.bias = torch.zeros(whole_blocks(self.outputs))
            self.bias[: self.outputs] = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Float32 [R, N] of rows x [R, K], by the step's own product."""
        rows = torch.zeros(len(x), whole_blocks(self.inputs))
        rows[:, : self.inputs] = x
        variant, threads = self._path.variant_of(self.weight.dtype), torch.get_num_threads()
        found = self._path.library.multiply(variant, self.weight.dtype, self.described(), rows, threads)
        return found[:, : self.outputs].contiguous()

    def plain(self) -> Tensor:
        """The weight [N, K] as the checkpoint has it."""
        return binding.unpack(self.weight, self.outputs, self.inputs)

    def described(self) -> binding.Product:
        return binding.Product(
            weight=pointer(self.weight), bias=pointer(self.bias), inputs=self.inputs, outputs=self.outputs
        )

    def products(self) -> Sequence[Linear]:
        return (self,)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


class CompiledPath:
    """The step in C for one instruction set and dtype: exact by construction, on the CPU."""

    exact = True
    layout: Layout = "step"
    heads_dtype: torch.dtype | None = torch.float32

    def __init__(self, library: Library, variant: Variant, dtype: torch.dtype) -> None:
        self.library, self.variant, self.dtype = library, variant, dtype
        self.name = f"compiled {variant}"
        self.kernels = f"{variant}:{str(dtype).removeprefix('torch.')}:{library.build}:"
        self._function = library.step(variant, dtype)
        self._scratch_bytes = library.scratch(variant, dtype)
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._lock = RLock()  # one step at a time: the scratch is one, and so are the threads
        self._steps = 0  # in progress: a watch may compute, too

    def pack(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return StepLinear(self, weight, bias)

    def embedding(self, plain: Tensor, tied: Linear | None) -> Tensor:
        return tied.tensors[0] if tied is not None else plain

    def new_cache(self, config: ModelConfig, capacity: int, *, dtype: torch.dtype, device: torch.device) -> BlockCache:
        return BlockCache(config, capacity=capacity, dtype=dtype, device=device)

    def variant_of(self, dtype: torch.dtype) -> Variant:
        """The variant that multiplies a weight of a dtype: adapters are float32 beside any model."""
        return self.variant if binding.has_step(self.variant, dtype) else "avx512"

    def step(
        self, weights: ModelWeights, ids: Tensor, cache: KVCache, rows: Rows, watch: LayerWatch | None
    ) -> Tensor | None:
        self._check(cache)
        if not self._in_place(cache):
            return self._through_copies(weights, ids, cache, rows, watch)
        scores = self.step_many([Chunk(weights=weights, ids=ids[0], cache=cache, rows=rows)], watch)[0]
        return scores if scores is None or rows == "last" else scores[None]

    def step_many(self, chunks: Sequence[Chunk], watch: LayerWatch | None) -> list[Tensor | None]:
        caches: list[Any] = [one.cache for one in chunks]
        for cache in caches:
            self._check(cache)
            if not self._in_place(cache) or cache.planes is not caches[0].planes:
                raise CacheShapeError("the caches of a batch must be paged ones over one pool of this model")
        for cache, one in zip(caches, chunks, strict=True):
            cache.prepare(len(one.ids))
        order = list(range(len(chunks)))
        if len(chunks) > 1:  # neighbours that share blocks have them read once
            order.sort(key=lambda number: (len(chunks[number].ids), caches[number].blocks))
        found = dict(zip(order, self._computed([chunks[number] for number in order], watch), strict=True))
        for cache, one in zip(caches, chunks, strict=True):
            cache.filled(len(one.ids))
        return [found[number] for number in range(len(chunks))]

    def _check(self, cache: KVCache) -> None:
        if cache.dtype != self.dtype or cache.device.type != "cpu":
            raise CacheShapeError(f"the cache is {cache.dtype} on {cache.device}; this model is {self.dtype} on cpu")

    def _in_place(self, cache: KVCache) -> bool:
        """Whether the step reads and writes this cache as it is."""
        return isinstance(cache, BlockedCache) and cache.layout == self.layout

    def _through_copies(
        self, weights: ModelWeights, ids: Tensor, cache: KVCache, rows: Rows, watch: LayerWatch | None
    ) -> Tensor | None:
        """A cache of another layout: each sequence is copied into blocks, and what is new copied back."""
        first, end = cache.length, cache.length + ids.shape[1]
        held = [torch.stack(kind) for kind in zip(*map(cache.read, range(cache.num_layers)), strict=True)]
        found, new = [], []
        for row in range(len(ids)):
            copy = BlockCache(weights.config, capacity=end, dtype=cache.dtype)
            copy.adopt(*(kind[:, row] for kind in held))
            found += self._computed([Chunk(weights=weights, ids=ids[row], cache=copy, rows=rows)], watch)
            new.append(copy.written(first, end))
        keys, values = (torch.stack(kind, dim=1) for kind in zip(*new, strict=True))  # [layers, B, G, T, D]
        for layer in range(cache.num_layers):
            cache.update(layer, keys[layer], values[layer])
        scores = [one for one in found if one is not None]
        if not scores:
            return None
        return torch.cat(scores) if rows == "last" else torch.stack(scores)

    def _computed(self, chunks: Sequence[Chunk], watch: LayerWatch | None) -> list[Tensor | None]:
        """Scores [1 or T, V] of each chunk; their keys and values are in the caches afterwards, not yet advanced."""
        ids = (chunks[0].ids if len(chunks) == 1 else torch.cat([one.ids for one in chunks])).contiguous()
        scored = [{"last": 1, "all": len(one.ids), "none": 0}[one.rows] for one in chunks]
        vocabulary = chunks[0].weights.config.vocab_size
        scores = torch.empty(sum(scored), whole_blocks(vocabulary))
        caught: list[BaseException] = []
        watching = _watching(watch, caught)
        watching.send(None)  # type: ignore[arg-type]
        watched = watch is not None or len(ids) >= INTERRUPTIBLE_ROWS
        with self._lock:
            distinct = {id(one.weights): one.weights for one in chunks}
            known = {key: Bound.of(weights) for key, weights in distinct.items()}
            if len({one.shared for one in known.values()}) > 1:
                raise UsageError("the sequences of a batch are computed with one model, adapters aside")
            networks = [known[id(one.weights)].network for one in chunks]
            sequences = (binding.Sequence * len(chunks))(*map(_described, chunks, networks, scored))
            call = binding.Call(
                planes=_planes(chunks[0].cache),
                sequences=sequences,
                ids=pointer(ids),
                scores=pointer(scores),
                watcher=binding.Watcher(watching.send) if watched else binding.Watcher(),
                num_sequences=len(chunks),
                threads=torch.get_num_threads(),
            )
            scratch = self._scratch_for(call)
            call.scratch = -(-scratch.data_ptr() // ALIGNMENT) * ALIGNMENT
            self._steps += 1
            try:
                status = self._function(ctypes.byref(call))
            finally:
                self._steps -= 1
        if caught:
            raise caught[0]
        if status == binding.CANCELLED:
            raise KeyboardInterrupt  # it came outside the watch's try, where ctypes drops it
        if status == binding.NONFINITE:
            one = next(chunk for chunk, sequence in zip(chunks, sequences, strict=True) if sequence.broken)
            raise nonfinite(one.cache.length, len(one.ids), self.dtype, one.cache)
        parts = scores[:, :vocabulary].split(scored)
        return [part if count else None for part, count in zip(parts, scored, strict=True)]

    def _scratch_for(self, call: binding.Call) -> Tensor:
        """It grows to what the largest step so far needed; a step within a step has its own."""
        needed = int(self._scratch_bytes(ctypes.byref(call))) + ALIGNMENT
        if self._steps:
            return torch.empty(needed, dtype=torch.uint8)
        if needed > len(self._scratch):
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        return self._scratch


def _watching(watch: LayerWatch | None, caught: list[BaseException]) -> Generator[int, int, None]:
    """Takes layers, gives whether to go on. An interrupt that comes meanwhile is raised at a yield, inside the try.

    The library calls `send`, which runs no line of Python before it is back in here: nothing can be raised outside.
    """
    go_on = 1
    while True:
        try:
            layer = yield go_on
            if watch is not None:
                watch(layer)
        except GeneratorExit:
            raise
        except BaseException as error:
            caught.append(error)
            go_on = 0


def _described(chunk: Chunk, network: binding.Network, scored: int) -> binding.Sequence:
    cache: Any = chunk.cache
    return binding.Sequence(
        model=ctypes.pointer(network),
        table=pointer(cache.table),
        first=cache.length,
        rows=len(chunk.ids),
        scored=scored,
    )


def _planes(cache: Any) -> binding.Planes:
    layer, kind, head, *_ = cache.planes.stride()
    return binding.Planes(blocks=pointer(cache.planes), layer_stride=layer, kind_stride=kind, head_stride=head)

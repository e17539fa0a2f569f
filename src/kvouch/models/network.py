"""Weights as the structs that the compiled step reads. Knows layouts; computes nothing.

Every tensor's dtype and shape is checked before its address is given away: the kernels believe what they are told.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

from kvouch.cache.blocks import whole_blocks
from kvouch.errors import TensorError
from kvouch.kernels import binding
from kvouch.models.config import ModelConfig
from kvouch.models.linear import Linear
from kvouch.models.lora import LoraLinear, LoraPart
from kvouch.models.step import ModelWeights, Parts

GAINS = ("attention_gain", "attention_bias", "query_gain", "key_gain", "mlp_gain", "mlp_bias")
PRODUCTS = ("qkv", "output", "up", "down")
TABLES = ("embedding", "positions", "cosines", "sines", "final_gain", "final_bias")


class Bound:
    """Weights as the library's structs. Holds the numbers that these point to, whatever becomes of the tensors."""

    def __init__(self, weights: ModelWeights) -> None:
        """Raises TensorError for a tensor whose dtype or shape the kernels would misread."""
        self._blocks, self._seen = list(weights.blocks), weights.tensors()
        self._held: list[Any] = []
        config, self._dtype = weights.config, weights.head.tensors[0].dtype
        hidden, vocabulary, positions = config.hidden_size, config.vocab_size, config.max_position_embeddings
        layers = [self._layer(block.parts(), config) for block in weights.blocks]
        head = self._product("head", weights.head, vocabulary, hidden)
        tied = weights.embedding is weights.head.tensors[0]
        gain, bias = weights.final_norm()
        self.network = binding.Network(
            layers=self._array(binding.Layer, layers),
            embedding=head.weight
            if tied
            else self._at("embedding", weights.embedding, self._dtype, vocabulary, hidden),
            final_gain=self._at("final norm", gain, torch.float32, hidden),
            final_bias=self._at("final norm", bias, torch.float32, hidden),
            head=head,
            num_layers=len(layers),
            hidden=hidden,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            inner=config.intermediate_size,
            activation=binding.ACTIVATIONS[config.activation],
            gated=config.gated,
            tied=tied,
            eps=config.norm_eps,
        )
        if config.rope is None:
            self.network.positions = self._at("positions", weights.tables[0], self._dtype, positions, hidden)
        else:
            for name, table in zip(("cosines", "sines"), weights.tables, strict=True):
                setattr(self.network, name, self._at(name, table, torch.float32, positions, 1, config.head_dim))

        self.shared = _shared(self.network, layers)

    @staticmethod
    def of(weights: ModelWeights) -> "Bound":
        """The structs of the tensors that there are now: made again where one was replaced."""
        bound: Bound | None = weights.bound
        if bound is None or not bound.fits(weights):
            bound = weights.bound = Bound(weights)
        return bound

    def fits(self, weights: ModelWeights) -> bool:
        """Whether it was made of these very blocks and tensors."""
        now = weights.tensors()
        return (
            len(now) == len(self._seen)
            and len(weights.blocks) == len(self._blocks)
            and all(map(is_, now, self._seen))
            and all(map(is_, weights.blocks, self._blocks))
        )

    def _layer(self, parts: Parts, config: ModelConfig) -> binding.Layer:
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        query, key_value = config.num_attention_heads * size, config.num_key_value_heads * size
        gains = {
            "attention_gain": (parts.attention_gain, hidden),
            "attention_bias": (parts.attention_bias, hidden),
            "query_gain": (parts.query_gain, size),
            "key_gain": (parts.key_gain, size),
            "mlp_gain": (parts.mlp_gain, hidden),
            "mlp_bias": (parts.mlp_bias, hidden),
        }
        return binding.Layer(
            **{name: self._at(name, tensor, torch.float32, width) for name, (tensor, width) in gains.items()},
            qkv=self._product("qkv", parts.qkv, query + 2 * key_value, hidden),
            output=self._product("output", parts.output, hidden, query),
            up=self._product("up", parts.up, (1 + config.gated) * inner, hidden),
            down=self._product("down", parts.down, hidden, inner),
        )

    def _product(self, name: str, linear: Linear, outputs: int, inputs: int) -> binding.Product:
        base = linear.base if isinstance(linear, LoraLinear) else linear
        corrections = [self._correction(name, part) for part in linear.parts] if isinstance(linear, LoraLinear) else []
        weight, *bias = base.tensors
        return binding.Product(
            weight=self._packed(name, weight, self._dtype, outputs, inputs),
            bias=self._at(f"{name} bias", bias[0], torch.float32, whole_blocks(outputs)) if bias else None,
            corrections=self._array(binding.Lora, corrections),
            inputs=inputs,
            outputs=outputs,
            num_corrections=len(corrections),
        )

    def _correction(self, name: str, part: LoraPart) -> binding.Lora:
        (a,), (b,) = part.down.tensors, part.up.tensors
        rank, outputs = part.up.inputs, part.stop - part.start
        return binding.Lora(
            a=self._packed(f"{name} adapter", a, torch.float32, rank, part.down.inputs),
            b=self._packed(f"{name} adapter", b, torch.float32, outputs, rank),
            rank=rank,
            start=part.start,
            outputs=outputs,
            scale=part.scale,
        )

    def _packed(self, name: str, tensor: Tensor, dtype: torch.dtype, outputs: int, inputs: int) -> int | None:
        return self._at(name, tensor, dtype, *binding.packed_shape(outputs, inputs, dtype))

    def _at(self, name: str, tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> int | None:
        """Where the numbers begin; None where there is no tensor."""
        if tensor is None:
            return None
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise TensorError(
                f"{name}: a {tensor.dtype} of shape {list(tensor.shape)} on {tensor.device} was put in; the compiled "
                f"step reads a contiguous {dtype} of shape {list(shape)} on cpu"
            )
        if tensor.data_ptr() % dtype.itemsize:
            raise TensorError(f"{name}: the numbers do not begin at a multiple of their {dtype.itemsize} bytes")
        self._held.append(tensor.detach())
        return tensor.data_ptr()

    def _array(self, kind: Any, items: Sequence[Any]) -> Any:
        found = (kind * len(items))(*items)
        self._held.append(found)
        return found


def _shared(network: binding.Network, layers: Sequence[binding.Layer]) -> tuple[int | None, ...]:
    """Where everything but the corrections lies: the same for two models that one step can compute together."""
    products = [network.head, *(getattr(layer, name) for layer in layers for name in PRODUCTS)]
    return (
        *(getattr(network, name) for name in TABLES),
        *(getattr(layer, name) for layer in layers for name in GAINS),
        *(address for product in products for address in (product.weight, product.bias)),
    )

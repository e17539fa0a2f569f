"""The Llama family (Llama 2 and 3, SmolLM2, Mistral, Qwen 2, 2.5 and 3) in plain torch.

Knows its tensors' names and its arithmetic; the rows, the cache and attention are `step`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvouch.models.config import ModelConfig, Rope
from kvouch.models.layers import activation, rms_norm, rope_tables, rotate
from kvouch.models.linear import Linear
from kvouch.models.source import TensorSource
from kvouch.models.step import Block, ModelWeights, Parts, Path, Place, Target


@dataclass(frozen=True, kw_only=True)
class LlamaBlock:
    """One layer: norm, fused query-key-value, attention, output; norm, fused gate and up, down."""

    config: ModelConfig
    activate: Callable[[Tensor], Tensor]
    attention_norm: Tensor
    qkv: Linear  # rows of W: H * D queries, G * D keys, G * D values
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear  # rows of W: the gate, then up
    down: Linear

    def project(self, x: Tensor, place: Place) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        heads, rotated = config.num_attention_heads, config.num_attention_heads + config.num_key_value_heads
        qkv = self.qkv(rms_norm(x, self.attention_norm, config.norm_eps))
        qkv = qkv.view(len(x), -1, config.head_dim)
        query_key, values = qkv[:, :rotated], qkv[:, rotated:]
        if self.query_norm is not None and self.key_norm is not None:
            queries = rms_norm(query_key[:, :heads], self.query_norm, config.norm_eps)
            keys = rms_norm(query_key[:, heads:], self.key_norm, config.norm_eps)
            query_key = torch.cat([queries, keys], dim=1)
        if place is not None:
            query_key = rotate(query_key, *place)
        return query_key[:, :heads], query_key[:, heads:], values

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.output(attended)
        gate, up = self.gate_up(rms_norm(x, self.mlp_norm, self.config.norm_eps)).chunk(2, dim=1)
        return x + self.down(self.activate(gate) * up)

    def linears(self) -> Sequence[Linear]:
        return (self.qkv, self.output, self.gate_up, self.down)

    def parts(self) -> Parts:
        return Parts(
            attention_gain=self.attention_norm,
            qkv=self.qkv,
            query_gain=self.query_norm,
            key_gain=self.key_norm,
            output=self.output,
            mlp_gain=self.mlp_norm,
            up=self.gate_up,
            down=self.down,
        )

    def tensors(self) -> list[Tensor]:
        norms = (self.attention_norm, self.query_norm, self.key_norm, self.mlp_norm)
        found = [norm for norm in norms if norm is not None]
        for linear in self.linears():
            found += linear.tensors
        return found


class LlamaWeights(ModelWeights):
    """A Llama-family model."""

    layer_prefix, module_prefix = "model.layers.", ""

    def __init__(self, config: ModelConfig, rope: Rope, source: TensorSource, path: Path) -> None:
        hidden = config.hidden_size
        embedding = source.take("model.embed_tokens.weight", config.vocab_size, hidden)
        blocks = [_block(config, source, f"model.layers.{layer}.", path) for layer in range(config.num_hidden_layers)]
        super().__init__(config, blocks, path)
        self.norm = source.take("model.norm.weight", hidden).float()
        tied = config.tie_word_embeddings
        self.head = path.pack(embedding if tied else source.take("lm_head.weight", config.vocab_size, hidden))
        self.embedding = path.embedding(embedding, self.head if tied else None)
        dtype = path.heads_dtype or embedding.dtype
        tables = rope_tables(rope, config.head_dim, config.max_position_embeddings, dtype)
        self.cosines, self.sines = (table[:, None].to(embedding.device) for table in tables)  # [positions, 1, D]

    def embed(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Place]:
        return F.embedding(ids, self.embedding).float(), (self.cosines[positions], self.sines[positions])

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return self.cosines, self.sines

    def targets(self) -> dict[str, Target]:
        config = self.config
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        query, key_value = config.num_attention_heads * size, config.num_key_value_heads * size
        return {
            "self_attn.q_proj": Target(linear="qkv", start=0, outputs=query, inputs=hidden),
            "self_attn.k_proj": Target(linear="qkv", start=query, outputs=key_value, inputs=hidden),
            "self_attn.v_proj": Target(linear="qkv", start=query + key_value, outputs=key_value, inputs=hidden),
            "self_attn.o_proj": Target(linear="output", start=0, outputs=hidden, inputs=query),
            "mlp.gate_proj": Target(linear="gate_up", start=0, outputs=inner, inputs=hidden),
            "mlp.up_proj": Target(linear="gate_up", start=inner, outputs=inner, inputs=hidden),
            "mlp.down_proj": Target(linear="down", start=0, outputs=hidden, inputs=inner),
        }

    def final_norm(self) -> tuple[Tensor, Tensor | None]:
        return self.norm, None

    def scores(self, x: Tensor) -> Tensor:
        return self.head(rms_norm(x, self.norm, self.config.norm_eps))

    def tensors(self) -> list[Tensor]:
        found = [self.embedding, self.norm, self.cosines, self.sines]
        found += [tensor for tensor in self.head.tensors if tensor is not self.embedding]
        for block in self.blocks:
            found += block.tensors()
        return found


def _block(config: ModelConfig, source: TensorSource, prefix: str, path: Path) -> Block:
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    query, key_value = config.num_attention_heads * size, config.num_key_value_heads * size
    qkv = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}  # outputs of each, in the fused order
    gate_up = {"gate_proj": inner, "up_proj": inner}
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return LlamaBlock(
        config=config,
        activate=activation(config.activation),
        attention_norm=source.take(prefix + "input_layernorm.weight", hidden).float(),
        qkv=_fused(source, attention, qkv, hidden, path, bias=config.qkv_bias),
        query_norm=_head_norm(source, attention + "q_norm.weight", config, path),
        key_norm=_head_norm(source, attention + "k_norm.weight", config, path),
        output=path.pack(
            source.take(attention + "o_proj.weight", hidden, query),
            source.take(attention + "o_proj.bias", hidden) if config.output_bias else None,
        ),
        mlp_norm=source.take(prefix + "post_attention_layernorm.weight", hidden).float(),
        gate_up=_fused(source, mlp, gate_up, hidden, path, bias=config.mlp_bias),
        down=path.pack(
            source.take(mlp + "down_proj.weight", hidden, inner),
            source.take(mlp + "down_proj.bias", hidden) if config.mlp_bias else None,
        ),
    )


def _head_norm(source: TensorSource, name: str, config: ModelConfig, path: Path) -> Tensor | None:
    if not config.qk_norm:
        return None
    gain = source.take(name, config.head_dim)
    return gain.to(path.heads_dtype or gain.dtype)


def _fused(
    source: TensorSource, prefix: str, outputs: dict[str, int], inputs: int, path: Path, *, bias: bool
) -> Linear:
    """Several products of the same rows as one, in the order of `outputs`."""
    weight = _joined([source.take(f"{prefix}{name}.weight", width, inputs) for name, width in outputs.items()])
    biases = [source.take(f"{prefix}{name}.bias", width) for name, width in outputs.items()] if bias else None
    return path.pack(weight, _joined(biases) if biases else None)


def _joined(parts: list[Tensor]) -> Tensor:
    """Tensors one below the other. `torch.cat` on the meta device, where shapes are checked, imports for seconds."""
    widths = [len(part) for part in parts]
    joined = parts[0].new_empty(sum(widths), *parts[0].shape[1:])
    for part, rows in zip(parts, joined.split(widths), strict=True):
        rows.copy_(part)
    return joined

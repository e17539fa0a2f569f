"""GPT-2. Knows its tensors' names (without the `transformer.` prefix) and its arithmetic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from kvouch.models.config import ModelConfig
from kvouch.models.layers import activation, layer_norm
from kvouch.models.linear import Linear
from kvouch.models.source import TensorSource
from kvouch.models.step import ModelWeights, Parts, Path, Place, Target


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A layer norm's gain and bias."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


@dataclass(frozen=True, kw_only=True)
class GPT2Block:
    """One layer: norm, fused query-key-value, attention, output; norm, feed-forward."""

    head_dim: int
    activate: Callable[[Tensor], Tensor]
    attention_norm: Norm
    qkv: Linear
    output: Linear
    mlp_norm: Norm
    up: Linear
    down: Linear

    def project(self, x: Tensor, place: Place) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = self.qkv(self.attention_norm(x)).view(len(x), 3, -1, self.head_dim).unbind(1)
        return queries, keys, values

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.output(attended)
        return x + self.down(self.activate(self.up(self.mlp_norm(x))))

    def linears(self) -> Sequence[Linear]:
        return (self.qkv, self.output, self.up, self.down)

    def parts(self) -> Parts:
        return Parts(
            attention_gain=self.attention_norm.weight,
            attention_bias=self.attention_norm.bias,
            qkv=self.qkv,
            output=self.output,
            mlp_gain=self.mlp_norm.weight,
            mlp_bias=self.mlp_norm.bias,
            up=self.up,
            down=self.down,
        )

    def tensors(self) -> list[Tensor]:
        first, second = self.attention_norm, self.mlp_norm
        found = [first.weight, first.bias, second.weight, second.bias]
        for linear in self.linears():
            found += linear.tensors
        return found


class GPT2Weights(ModelWeights):
    """A GPT-2 model."""

    layer_prefix, module_prefix = "h.", "transformer."

    def __init__(self, config: ModelConfig, source: TensorSource, path: Path) -> None:
        hidden = config.hidden_size
        embedding = source.take("wte.weight", config.vocab_size, hidden)
        self.positions = source.take("wpe.weight", config.max_position_embeddings, hidden)
        blocks = [_block(config, source, f"h.{layer}.", path) for layer in range(config.num_hidden_layers)]
        super().__init__(config, blocks, path)
        self.norm = _norm(config, source, "ln_f.")
        tied = config.tie_word_embeddings
        self.head = path.pack(embedding if tied else source.take("lm_head.weight", config.vocab_size, hidden))
        self.embedding = path.embedding(embedding, self.head if tied else None)

    def embed(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, Place]:
        return F.embedding(ids, self.embedding).float() + F.embedding(positions, self.positions), None

    @property
    def tables(self) -> tuple[Tensor, ...]:
        return (self.positions,)

    def targets(self) -> dict[str, Target]:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return {
            "attn.c_attn": Target(linear="qkv", start=0, outputs=3 * hidden, inputs=hidden),
            "attn.c_proj": Target(linear="output", start=0, outputs=hidden, inputs=hidden),
            "mlp.c_fc": Target(linear="up", start=0, outputs=inner, inputs=hidden),
            "mlp.c_proj": Target(linear="down", start=0, outputs=hidden, inputs=inner),
        }

    def final_norm(self) -> tuple[Tensor, Tensor | None]:
        return self.norm.weight, self.norm.bias

    def scores(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))

    def tensors(self) -> list[Tensor]:
        found = [self.embedding, self.positions, self.norm.weight, self.norm.bias]
        found += [tensor for tensor in self.head.tensors if tensor is not self.embedding]
        for block in self.blocks:
            found += block.tensors()
        return found


def _block(config: ModelConfig, source: TensorSource, prefix: str, path: Path) -> GPT2Block:
    hidden, inner = config.hidden_size, config.intermediate_size
    return GPT2Block(
        head_dim=config.head_dim,
        activate=activation(config.activation),
        attention_norm=_norm(config, source, prefix + "ln_1."),
        qkv=_conv1d(source, prefix + "attn.c_attn.", hidden, 3 * hidden, path),
        output=_conv1d(source, prefix + "attn.c_proj.", hidden, hidden, path),
        mlp_norm=_norm(config, source, prefix + "ln_2."),
        up=_conv1d(source, prefix + "mlp.c_fc.", hidden, inner, path),
        down=_conv1d(source, prefix + "mlp.c_proj.", inner, hidden, path),
    )


def _norm(config: ModelConfig, source: TensorSource, prefix: str) -> Norm:
    return Norm(
        weight=source.take(prefix + "weight", config.hidden_size).float(),
        bias=source.take(prefix + "bias", config.hidden_size).float(),
        eps=config.norm_eps,
    )


def _conv1d(source: TensorSource, prefix: str, inputs: int, outputs: int, path: Path) -> Linear:
    """GPT-2 stores its products as [inputs, outputs]."""
    weight = source.take(prefix + "weight", inputs, outputs).t().contiguous()
    return path.pack(weight, source.take(prefix + "bias", outputs))

"""What a forward pass must know of a model: sizes, norms, positions, activation. Knows nothing of files."""

from dataclasses import dataclass
from typing import Literal

Family = Literal["gpt2", "llama"]
Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3's rope scaling: low frequencies are divided by `factor`, high ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: angle of pair i at position p is p / theta ** (2 i / D), then scaled."""

    theta: float
    linear_factor: float = 1.0  # positions are divided by it
    llama3: Llama3Scaling | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Every number of a config that changes the computation."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: Activation
    tie_word_embeddings: bool
    rope: Rope | None = None  # None: learned positions
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def gated(self) -> bool:
        """Whether the feed-forward part multiplies by a gate."""
        return self.family == "llama"

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_attention_heads // self.num_key_value_heads

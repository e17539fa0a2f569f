"""The plain uncached forward pass: the whole sequence, one full causal mask, no cache, no packing, no tiles.

What the fast path is compared with. Written from the architectures' own definitions; of the fast path's arithmetic it
shares rope's frequencies only.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from kvouch.models.config import ModelConfig
from kvouch.models.layers import rope_frequencies

Tensors = Mapping[str, Tensor]


def forward_uncached(ids: Tensor, tensors: Tensors, config: ModelConfig) -> Tensor:
    """Scores [B, T, V] of ids [B, T] from a checkpoint's own tensors (GPT-2's without the `transformer.` prefix)."""
    with torch.no_grad():
        return _gpt2(ids, tensors, config) if config.family == "gpt2" else _llama(ids, tensors, config)


def _gpt2(ids: Tensor, w: Tensors, config: ModelConfig) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.pow(2).mean(-1, keepdim=True) + config.norm_eps).rsqrt()
        return centred * scale * w[name + ".weight"] + w[name + ".bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[name + ".weight"] + w[name + ".bias"]

    x = w["wte.weight"][ids] + w["wpe.weight"][torch.arange(ids.shape[1])]
    for layer in range(config.num_hidden_layers):
        prefix = f"h.{layer}."
        q, k, v = linear(norm(x, prefix + "ln_1"), prefix + "attn.c_attn").chunk(3, dim=-1)
        x = x + linear(_attention(q, k, v, config), prefix + "attn.c_proj")
        x = x + linear(_activate(linear(norm(x, prefix + "ln_2"), prefix + "mlp.c_fc"), config), prefix + "mlp.c_proj")
    return norm(x, "ln_f") @ w.get("lm_head.weight", w["wte.weight"]).T


def _llama(ids: Tensor, w: Tensors, config: ModelConfig) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).rsqrt() * w[name + ".weight"]

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[name + ".weight"], w.get(name + ".bias"))

    def heads_norm(x: Tensor, name: str) -> Tensor:
        return norm(x.unflatten(-1, (-1, config.head_dim)), name).flatten(-2) if config.qk_norm else x

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        h = norm(x, prefix + "input_layernorm")
        q, k, v = (linear(h, f"{prefix}self_attn.{name}_proj") for name in "qkv")
        q, k = heads_norm(q, prefix + "self_attn.q_norm"), heads_norm(k, prefix + "self_attn.k_norm")
        q, k = _rotate(q, config), _rotate(k, config)
        x = x + linear(_attention(q, k, v, config), prefix + "self_attn.o_proj")
        h = norm(x, prefix + "post_attention_layernorm")
        gated = _activate(linear(h, prefix + "mlp.gate_proj"), config) * linear(h, prefix + "mlp.up_proj")
        x = x + linear(gated, prefix + "mlp.down_proj")
    head = w["model.embed_tokens.weight"] if config.tie_word_embeddings else w["lm_head.weight"]
    return norm(x, "model.norm") @ head.T


def _attention(q: Tensor, k: Tensor, v: Tensor, config: ModelConfig) -> Tensor:
    """Scaled dot-product attention under one full causal mask; q [B, T, H * D], k and v [B, T, G * D]."""
    q, k, v = (x.unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(config.group, dim=1) for x in (k, v))  # [B, H, T, D]
    length = q.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(config.head_dim)).masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def _rotate(x: Tensor, config: ModelConfig) -> Tensor:
    """Rotary positions on x [B, T, heads * D]: pair (i, i + D / 2) turned by its angle, as a complex product."""
    if config.rope is None:
        return x
    angles = torch.arange(x.shape[1])[:, None].float() * rope_frequencies(config.rope, config.head_dim)
    turns = torch.polar(torch.ones_like(angles), angles)[:, None].to(x.device)  # [T, 1, D / 2]
    real, imaginary = x.float().unflatten(-1, (-1, 2, config.head_dim // 2)).unbind(-2)
    turned = torch.complex(real, imaginary) * turns
    return torch.cat([turned.real, turned.imag], dim=-1).flatten(2).to(x.dtype)


def _activate(x: Tensor, config: ModelConfig) -> Tensor:
    match config.activation:
        case "silu":
            return x * x.sigmoid()
        case "gelu":
            return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
        case "gelu_tanh":
            return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x.pow(3))))

"""A small GPT written for reading: pre-norm (RMSNorm), rotary positions, SwiGLU, tied embeddings.

Packed sequences: attention is causal within a document, and positions start again in each, so that a document's
logits are those that it has alone. Sources: RMSNorm arXiv:1910.07467, rotary arXiv:2104.09864, SwiGLU arXiv:2002.05202,
tied embeddings arXiv:1608.05859, initialisation GPT-2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megaflow_stream.training.batch import MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTConfig:
    """vocabulary: number of token ids. width: of the residual stream, a multiple of heads. hidden: of the SwiGLU."""

    vocabulary: int
    layers: int = 4
    heads: int = 4
    width: int = 128
    hidden: int = 344
    rotary_base: float = 10_000.0

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width {self.width} must be an even multiple of heads {self.heads}")


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates each pair (i, i + D/2) of x [B, H, T, D] by its position's angle; cosine and sine are [B, 1, T, D/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), dim=-1)


class Attention(nn.Module):
    """Causal attention of H heads, with rotated queries and keys."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, mask: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(rotate(q, cosine, sine), rotate(k, cosine, sine), v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, c))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.width, 2 * config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config)
        self.forward_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, mask: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask, cosine, sine)
        return x + self.feed_forward(self.forward_norm(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Logits of the next token. The output layer is the embedding's own matrix."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Layers that write to the residual stream start smaller, so that its size does not grow with depth.
                shrink = math.sqrt(2 * config.layers) if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 / shrink)

    def hidden(self, tokens: Tensor, sequence_ids: Tensor, positions: Tensor) -> Tensor:
        """int64 [B, T] each -> the normalised residual stream, [B, T, width]."""
        size = self.config.width // self.config.heads
        powers = torch.arange(0, size, 2, device=tokens.device, dtype=torch.float32) / size
        angles = positions[:, None, :, None] * self.config.rotary_base**-powers
        same = sequence_ids[:, None, :, None] == sequence_ids[:, None, None, :]
        mask = same & torch.ones(same.shape[-2:], dtype=torch.bool, device=tokens.device).tril()
        x = self.embedding(tokens)
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, mask, cosine, sine)
        return self.norm(x)  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, sequence_ids: Tensor, positions: Tensor) -> Tensor:
        """int64 [B, T] each -> logits [B, T, vocabulary]."""
        return F.linear(self.hidden(tokens, sequence_ids, positions), self.embedding.weight)


def loss(model: GPT, batch: MicroBatch) -> tuple[Tensor, int]:
    """Summed cross-entropy over the trained targets, in nats, and how many they are.

    The output layer is computed for those targets only: they are a third of an agent's conversation."""
    x = model.hidden(batch.tokens, batch.sequence_ids, batch.positions)
    logits = F.linear(x[batch.loss_mask], model.embedding.weight)
    targets = batch.targets[batch.loss_mask]
    return F.cross_entropy(logits.float(), targets, reduction="sum"), targets.numel()

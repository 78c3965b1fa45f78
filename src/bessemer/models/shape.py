"""The shape of a GPT and what follows from it: windows, parameter counts, FLOPs. Plain numbers, no arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

VOCAB_MULTIPLE = 64  # vocabulary rows are padded to this, so that they divide over tensor-parallel devices
WINDOW_MULTIPLE = 128  # short windows are rounded up to this, a tile of the attention kernels
SMEAR_CHANNELS = 24
VALUE_GATE_CHANNELS = 12


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class LookupShape:
    """Sizes of the lookup layers. mean_k: rows a training token attends to on average, by token frequency."""

    layers: tuple[int, ...]
    rows: int
    d_up: int
    tied: bool
    mean_k: float

    def tables(self, width: int) -> int:
        """Parameters of K and V, all layers: looked up, so not scaling parameters."""
        return len(self.layers) * self.rows * width * (1 if self.tied else 2)

    def dense(self, width: int) -> int:
        """Parameters of W_up and W_mix, all layers."""
        return len(self.layers) * width * (2 * self.d_up + width)


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of the experts of a layer. width: of one expert; biased: each has a bias that balances their load."""

    count: int
    active: int
    shared: int
    width: int
    biased: bool

    @property
    def shared_width(self) -> int:
        """Width of the shared experts, which are one dense layer; 0 without any."""
        return self.shared * self.width


@dataclass(frozen=True)
class Shape:
    """All derived sizes of one GPT. `windows[i]`: keys that layer i attends to, None = all, 0 = a recurrent layer."""

    depth: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    windows: tuple[int | None, ...]
    value_embeddings: bool = True
    smear: bool = True
    residual_mix: bool = True
    backout: bool = True
    lookup: LookupShape | None = None
    experts: ExpertShape | None = None
    bigram_rows: int = 0
    key_offset: bool = False
    dense_connections: bool = False
    paired_heads: bool = False

    mlp_matrices: ClassVar[int] = 2

    @property
    def padded_vocab(self) -> int:
        return round_up(self.vocab_size, VOCAB_MULTIPLE)

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def mlp_width(self) -> int:
        return 4 * self.width

    @property
    def remembered(self) -> int:
        """Channels of the last token's embedding that the KV cache stores, for smear."""
        return self.width

    @property
    def bigram_parameters(self) -> int:
        return self.bigram_rows * self.width

    @property
    def connected(self) -> int:
        """Outputs that the dense connections of all layers read, the embeddings included: 2 + 3 + … + (depth + 1)."""
        return self.depth * (self.depth + 3) // 2 if self.dense_connections else 0

    def connection_parameters(self) -> tuple[int, int, int]:
        """(parameters of R, of W, of b), all layers: models/dense_connections.py."""
        hidden = (self.depth + 1) * self.dense_connections
        return self.depth * self.width * hidden, self.connected * hidden, self.connected

    @property
    def smear_channels(self) -> int:
        return min(SMEAR_CHANNELS, self.width)

    @property
    def gate_channels(self) -> int:
        return min(VALUE_GATE_CHANNELS, self.width)

    @property
    def dense_width(self) -> int:
        """Width of the feed-forward layer that every token uses; with experts, of the shared ones."""
        return self.mlp_width if self.experts is None else self.experts.shared_width

    def feed_forward_parameters(self, active: bool = False) -> int:
        """Parameters of the feed-forward matrices of a layer, or of those that one token is multiplied with."""
        experts = self.experts
        used = 0 if experts is None else (experts.active if active else experts.count) * experts.width
        return self.mlp_matrices * self.width * (self.dense_width + used)

    def router_parameters(self) -> tuple[int, int]:
        """(parameters of the routers' matrices, of their biases), all layers."""
        if self.experts is None:
            return 0, 0
        return self.depth * self.width * self.experts.count, self.depth * self.experts.count * self.experts.biased

    def idle_experts(self) -> int:
        """Parameters that a token is not multiplied with, all layers."""
        return self.depth * (self.feed_forward_parameters() - self.feed_forward_parameters(active=True))

    def has_value_embedding(self, layer: int) -> bool:
        """Whether the layer has one: every other layer, counted from the last."""
        return self.value_embeddings and layer % 2 == (self.depth - 1) % 2

    def count_parameters(self) -> dict[str, int]:
        """Parameters by optimizer group, with `total` and `scaling` (matrices in blocks + head; of experts the active).

        Lookup and bigram tables count with the value embeddings, whose optimizer group they share.
        """
        value_layers = sum(self.has_value_embedding(layer) for layer in range(self.depth))
        per_block = 2 * self.width * (self.query_width + self.kv_width) + self.feed_forward_parameters()
        router, router_bias = self.router_parameters()
        tables, dense = (self.lookup.tables(self.width), self.lookup.dense(self.width)) if self.lookup else (0, 0)
        tables += self.bigram_parameters
        read, write, bias = self.connection_parameters()
        counts = {
            "matrix": self.depth * per_block + dense,
            "gate": value_layers * self.gate_channels * self.kv_heads + router + read,
            "embedding": self.padded_vocab * self.width,
            "head": self.padded_vocab * self.width,
            "value_embedding": value_layers * self.padded_vocab * self.kv_width + tables,
            "rho": self.depth * self.residual_mix + write + bias,
            "xi": self.depth * self.residual_mix,
            "scalar": (self.smear_channels + 1) * self.smear + int(self.backout) + router_bias,
        }
        total = sum(counts.values())
        return {**counts, "total": total, "scaling": counts["matrix"] - self.idle_experts() + counts["head"]}

    def matmul_parameters(self) -> int:
        """Parameters in a token's matrix products: all but tables, scalars and experts that it does not use."""
        counts, small = self.count_parameters(), self.smear_channels * self.smear + self.connection_parameters()[1]
        return counts["matrix"] - self.idle_experts() + counts["head"] + counts["gate"] + small

    def flops_per_token(self, block_size: int, causal: bool = False) -> float:
        """Training FLOPs per token: 6 × (parameters in matmuls) + Σ_layers 12 · width · min(window, T).

        A lookup layer is an attention over a token's mean k rows; `width` is that of the queries. `causal` counts only
        the keys that queries really attend to, averaged over the row.
        """
        keys = self.attended(block_size, causal)
        looked_up = len(self.lookup.layers) * self.lookup.mean_k if self.lookup else 0
        attention = 12 * self.query_width * keys + 12 * self.width * looked_up
        return 6 * self.matmul_parameters() + attention + self.recurrent_flops()

    def attended(self, block_size: int, causal: bool) -> float:
        """Keys that a query of each layer attends to, all layers; of paired heads those of both."""
        if not self.paired_heads:
            return sum(attended_keys(window, block_size, causal) for window in self.windows)
        windows = [None if window is None else 2 * window - 1 for window in self.windows]
        return sum(attended_keys(window, 2 * block_size, causal) for window in windows)

    def recurrent_flops(self) -> float:
        """Training FLOPs per token of recurrent layers, besides their matrices."""
        return 0


def explain_flops(shape: Shape, block_size: int) -> str:
    """Return the formula of `flops_per_token` with its numbers, in one line."""
    keys = shape.attended(block_size, causal=False)
    matmul, width = shape.matmul_parameters(), shape.query_width
    used = "active parameters" if shape.experts else "parameters"
    words = f"6 · {matmul:,} {used} in matmuls + 12 · {width:,} · {keys:,} keys of all layers"
    if recurrent := shape.recurrent_flops():
        words += f" + {recurrent:,.0f} of recurrent layers"
    if (lookup := shape.lookup) is None:
        return words
    return f"{words} + 12 · {shape.width:,} · {lookup.mean_k:,.4g} rows · {len(lookup.layers)} lookup layer(s)"


def attended_keys(window: int | None, block_size: int, causal: bool) -> float:
    """Keys counted per query: min(window, T), or with `causal` the mean over positions of min(window, t + 1)."""
    width = block_size if window is None else min(window, block_size)
    if not causal:
        return width
    return (width * (width + 1) / 2 + (block_size - width) * width) / block_size


def layer_windows(pattern: str, depth: int, block_size: int, short: float) -> tuple[int | None, ...]:
    """Tile `pattern` ("S" short, "L" long) over the layers; the last layer is always long.

    A short layer's query attends to exactly w keys, itself included: w = short · block_size rounded up to 128.
    A window that covers the block is the same as a long one.
    """
    width = round_up(math.ceil(short * block_size), WINDOW_MULTIPLE)
    letters = [pattern[layer % len(pattern)] for layer in range(depth - 1)] + ["L"]
    return tuple(width if letter == "S" and width < block_size else None for letter in letters)


def scan_segments(kinds: tuple[object, ...]) -> list[tuple[int, int, int]]:
    """Split layers into segments (start, period, repeats) whose kinds repeat, for scanning over groups.

    Greedy: at each layer take the repetition that saves most traced layers; a layer that repeats nothing is a
    segment (start, 1, 1). SSSL × 3 with alternating value embeddings is one segment (0, 4, 3).
    """
    segments, start = [], 0
    while start < len(kinds):
        best = (1, 1)
        for period in range(1, (len(kinds) - start) // 2 + 1):
            group = kinds[start : start + period]
            repeats = 1
            while kinds[start + repeats * period : start + (repeats + 1) * period] == group:
                repeats += 1
            if period * (repeats - 1) > best[0] * (best[1] - 1):
                best = (period, repeats)
        segments.append((start, *best))
        start += best[0] * best[1]
    return segments

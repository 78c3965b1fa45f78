"""The settings of a GPT, and what follows from them alone: its shape and its dtype."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from bessemer.config import field
from bessemer.models.attention import choose_attention
from bessemer.models.checks import PRECISIONS
from bessemer.models.fp8 import SCALINGS
from bessemer.models.fused import choose_kernels
from bessemer.models.layers import TENSOR_NAMES
from bessemer.models.lookup import LookupSettings, with_lookup
from bessemer.models.shape import Shape, layer_windows, round_up
from bessemer.topology.backend import backend


class GPTSettings(LookupSettings):
    """Sizes are `model/…`, derived from the depth where they are -1; every device of architecture is a switch."""

    depth: int = field("model/depth", default=12, minimum=1, help="layers; the dial that derives the rest")
    aspect: int = field(
        "model/aspect", default=64, minimum=1, help="width = depth × aspect, rounded up to head_dim"
    )
    head_dim: int = field("model/head_dim", default=128, minimum=2, help="size of one attention head")
    width: int = field("model/width", default=-1, help="residual width; -1 = derived from depth and aspect")
    heads: int = field("model/heads", default=-1, help="query heads; -1 = width / head_dim")
    kv_heads: int = field(
        "model/kv_heads", default=-1, help="key-value heads, a divisor of heads; -1 = heads"
    )
    vocab_size: int = field("model/vocab_size", default=-1, help="tokens; -1 = the tokenizer's")
    window: str = field("model/window", default="SSSL", help="S short, L full context; tiled, last layer L")
    window_short: float = field(
        "model/window_short", default=0.5, help="S as a share of block_size, up to 128s"
    )

    block_size: int = field("architecture/block_size", default=512, minimum=1, help="sequence length")
    precision: str = field(
        "architecture/precision",
        default="auto",
        choices=PRECISIONS,
        help="dtype of matmuls; auto = bf16 on accelerators, float32 on a CPU; fp8: training's, the rest as auto",
    )
    fp8_scaling: str = field(
        "architecture/fp8/scaling",
        default="tensorwise",
        choices=SCALINGS,
        help="fp8: a scale per tensor (faster), or per row with weight gradients in bf16 (closer)",
    )
    fp8_head: bool = field("architecture/fp8/head", default=False, help="fp8: convert the head too")
    fp8_emulate: bool = field(
        "architecture/fp8/emulate",
        default=False,
        help="fp8: same numbers on a chip without it, slowly; for tests",
    )
    attention: str = field(
        "architecture/attention",
        default="auto",
        choices=("auto", "xla", "cudnn"),
        help="attention kernel; auto = cuDNN on an NVIDIA GPU in half precision, XLA elsewhere",
    )
    kernels: str = field(
        "architecture/kernels",
        default="auto",
        choices=("auto", "xla", "pallas"),
        help="norms and loss; auto = one-pass kernels (pallas) on a GPU, XLA elsewhere",
    )
    remat: list[str] = field(
        "architecture/remat",
        default_factory=lambda: ["none"],
        help=f"recompute in the backward pass: none, block, or tensors of {', '.join(TENSOR_NAMES)}",
    )
    scan_layers: bool = field(
        "architecture/scan_layers", default=False, help="scan repeating layers: faster compile"
    )
    dropout: float = field("architecture/dropout", default=0.0, minimum=0.0, maximum=1.0, help="dropout rate")
    document_mask: bool = field(
        "architecture/document_mask", default=False, help="documents do not see each other"
    )
    loss_chunks: int | str = field(
        "architecture/loss_chunks", default="auto", help="pieces of the loss; auto by size"
    )
    smear: bool = field("architecture/smear", default=True, help="mix the previous token's embedding in")
    residual_mix: bool = field(
        "architecture/residual_mix", default=True, help="x ← ρx + ξx0 before each layer"
    )
    value_embeddings: bool = field(
        "architecture/value_embeddings", default=True, help="token tables added to v"
    )
    backout: bool = field("architecture/backout", default=True, help="subtract the middle layer's output")
    qk_norm: bool = field("architecture/qk_norm", default=True, help="norm queries and keys, then × 1.2")
    softcap: float = field(
        "architecture/softcap", default=15.0, minimum=0.0, help="c·tanh(logits/c); 0 = off"
    )
    rotary_base: float = field(
        "architecture/rotary_base", default=100_000.0, help="base of rotary frequencies"
    )

    def __post_init__(self) -> None:
        # A list would make the module unhashable, and so unusable as a static argument of jit.
        remat = (self.remat,) if isinstance(self.remat, str) else tuple(self.remat)
        object.__setattr__(self, "remat", remat)
        object.__setattr__(self, "lookup_after_layers", tuple(self.lookup_after_layers))
        super().__post_init__()

    @property
    def shape(self) -> Shape:
        width = self.width if self.width > 0 else round_up(self.depth * self.aspect, self.head_dim)
        heads = self.heads if self.heads > 0 else width // self.head_dim
        shape = Shape(
            depth=self.depth,
            width=width,
            heads=heads,
            kv_heads=self.kv_heads if self.kv_heads > 0 else heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            windows=layer_windows(self.window, self.depth, self.block_size, self.window_short),
            value_embeddings=self.value_embeddings,
            smear=self.smear,
            residual_mix=self.residual_mix,
            backout=self.backout,
        )
        return with_lookup(self, shape)

    @property
    def compute_dtype(self) -> Any:
        """Of every product outside float8: in an fp8 run that is validation, sampling, and what is not converted."""
        if self.precision in ("auto", "fp8"):
            return jnp.float32 if backend() == "cpu" else jnp.bfloat16
        return {"float32": jnp.float32, "bf16": jnp.bfloat16}[self.precision]

    def chosen_kernels(self) -> dict[str, tuple[str, str]]:
        """Setting -> (what runs on this backend, why), for those that are chosen by themselves."""
        dtype = self.compute_dtype
        attention = choose_attention(self.attention, dtype, self.head_dim, self.document_mask)
        rows = choose_kernels(self.kernels, dtype)
        why = f"{jnp.dtype(dtype).name}, head dimension {self.head_dim}"
        masked = ", with a document mask" if self.document_mask else ""
        return {
            "attention": (attention, f"for {why}{masked}"),
            "kernels": (rows, f"norms and loss for {jnp.dtype(dtype).name}"),
        }

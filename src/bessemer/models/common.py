"""Settings that mean the same in every family, and what follows from them alone."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from bessemer.config import field
from bessemer.kernels.attention import IMPLEMENTATIONS, choose_attention, layout_of
from bessemer.kernels.norms import choose_kernels
from bessemer.models.checks import PRECISIONS
from bessemer.models.layers import TENSOR_NAMES
from bessemer.models.shape import round_up
from bessemer.topology.chips import backend


class ModelSettings(nn.Module):
    """Sizes are `model/…`, derived from the depth where they are -1; how they are computed is `architecture/…`."""

    depth: int = field("model/depth", default=12, minimum=1, help="layers; the dial that derives the rest")
    aspect: int = field(
        "model/aspect", default=64, minimum=1, help="width = depth × aspect, rounded up to head_dim"
    )
    head_dim: int = field("model/head_dim", default=128, minimum=2, help="size of one attention head")
    width: int = field(
        "model/width",
        default=-1,
        minimum=1,
        also=(-1,),
        help="residual width; -1 = derived from depth and aspect",
    )
    heads: int = field(
        "model/heads", default=-1, minimum=1, also=(-1,), help="query heads; -1 = width / head_dim"
    )
    kv_heads: int = field(
        "model/kv_heads",
        default=-1,
        minimum=1,
        also=(-1,),
        help="key-value heads, a divisor of heads; -1 = heads",
    )
    vocab_size: int = field(
        "model/vocab_size", default=-1, minimum=1, also=(-1,), help="tokens; -1 = the tokenizer's"
    )

    block_size: int = field("architecture/block_size", default=512, minimum=1, help="sequence length")
    precision: str = field(
        "architecture/precision",
        default="auto",
        choices=PRECISIONS,
        help="dtype of matmuls; auto = bf16 on accelerators, float32 on a CPU; fp8: training's, the rest as auto",
    )
    attention: str = field(
        "architecture/attention",
        default="auto",
        choices=IMPLEMENTATIONS,
        help="attention kernel; auto = cuDNN on an NVIDIA GPU in half precision, splash on a TPU, XLA elsewhere",
    )
    kernels: str = field(
        "architecture/kernels",
        default="auto",
        choices=("auto", "xla", "pallas"),
        help="norms, relu² and loss; auto = one-pass kernels (pallas) on a GPU, XLA elsewhere",
    )
    remat: list[str] = field(
        "architecture/remat",
        default_factory=lambda: ["none"],
        help=f"recompute in the backward pass: none, block, or tensors of {', '.join(TENSOR_NAMES)}",
    )
    scan_layers: bool = field(
        "architecture/scan_layers", default=False, help="scan repeating layers: faster compile"
    )
    dropout: float = field("architecture/dropout", default=0.0, minimum=0.0, below=1.0, help="dropout rate")
    document_mask: bool = field(
        "architecture/document_mask", default=False, help="documents do not see each other"
    )
    loss_chunks: int | str = field(
        "architecture/loss_chunks", default="auto", help="pieces of the loss; auto by size"
    )

    def __post_init__(self) -> None:
        # A list would make the module unhashable, and so unusable as a static argument of jit.
        remat = (self.remat,) if isinstance(self.remat, str) else tuple(self.remat)
        object.__setattr__(self, "remat", remat)
        super().__post_init__()

    def sizes(self) -> dict[str, Any]:
        """depth, width, heads, kv_heads, head_dim and vocab_size, derived where they are -1."""
        width = self.width if self.width > 0 else round_up(self.depth * self.aspect, self.head_dim)
        heads = self.heads if self.heads > 0 else width // self.head_dim
        return {
            "depth": self.depth,
            "width": width,
            "heads": heads,
            "kv_heads": self.kv_heads if self.kv_heads > 0 else heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
        }

    @property
    def compute_dtype(self) -> Any:
        """Of every product outside float8: in an fp8 run that is validation, sampling, and what is not converted."""
        if self.precision in ("auto", "fp8"):
            return jnp.float32 if backend() == "cpu" else jnp.bfloat16
        return {"float32": jnp.float32, "bf16": jnp.bfloat16}[self.precision]

    def chosen_kernels(self) -> dict[str, tuple[str, str]]:
        """Setting -> (what runs on this platform and mesh, why), for those that are chosen by themselves."""
        dtype, s, length = self.compute_dtype, self.shape, self.block_size
        layout = layout_of((1, length, s.heads, s.head_dim), (1, length, s.kv_heads, s.head_dim))
        attention = choose_attention(self.attention, dtype, s.head_dim, self.document_mask, length, layout)
        rows = choose_kernels(self.kernels, dtype)
        why = f"{jnp.dtype(dtype).name}, head dimension {s.head_dim}"
        masked = ", with a document mask" if self.document_mask else ""
        return {
            "attention": (attention, f"for {why}{masked}{layout.describe()}"),
            "kernels": (rows, f"{self.kernel_work(rows)} for {jnp.dtype(dtype).name}"),
        }

    def kernel_work(self, implementation: str) -> str:
        """What `kernels` stands for, in words."""
        return "norms and loss"

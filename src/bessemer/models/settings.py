"""The settings of a GPT, and what follows from them alone: its shape."""

from __future__ import annotations

from bessemer.config import field
from bessemer.models.common import ModelSettings
from bessemer.models.fp8 import SCALINGS
from bessemer.models.lookup import LookupSettings, with_lookup
from bessemer.models.shape import Shape, layer_windows


class GPTSettings(ModelSettings, LookupSettings):
    """Every device of architecture is a switch."""

    window: str = field("model/window", default="SSSL", help="S short, L full context; tiled, last layer L")
    window_short: float = field(
        "model/window_short", default=0.5, above=0, maximum=1, help="S as a share of block_size, up to 128s"
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
        "architecture/rotary_base", default=100_000.0, above=1, help="base of rotary frequencies"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "lookup_after_layers", tuple(self.lookup_after_layers))
        super().__post_init__()

    @property
    def shape(self) -> Shape:
        shape = Shape(
            **self.sizes(),
            windows=layer_windows(self.window, self.depth, self.block_size, self.window_short),
            value_embeddings=self.value_embeddings,
            smear=self.smear,
            residual_mix=self.residual_mix,
            backout=self.backout,
        )
        return with_lookup(self, shape)

"""The olmo family: olmo 2 and 3. A llama whose norms come after attention and feed-forward instead of before.

    x += norm(W_o attention(x));  x += norm(W_down (silu(W_gate x) · W_up x))

Queries and keys are normed over all their heads at once, before rotary. In olmo 3 three of four layers slide, and only
the others have a scaled rotary table.
"""

from __future__ import annotations

from typing import Any

from bessemer.config import field
from bessemer.models.llama import Llama
from bessemer.models.protocol import BEFORE, ConfigReader, HFType, layer_types
from bessemer.registry import hf_types, models

LOCAL_BASE = 500_000.0
WINDOW = 4096


@models.register("olmo")
class Olmo(Llama):
    """olmo 2, or olmo 3 with `sliding_window` and `sliding_layers=SSSL`."""

    hf_type: str = field(
        "model/hf_type", default="auto", choices=("auto", "olmo2", "olmo3"), help="model_type of an export"
    )
    head_norm: bool = field(
        "architecture/head_norm", default=True, help="norm with weights of all queries and of all keys of a token"
    )

    @property
    def natural_type(self) -> str:
        return "olmo3" if self.sliding_window or self.rope_local_base else "olmo2"

    def norm_sizes(self) -> dict[str, int]:
        sizes = self.sizes()
        heads = {"q_norm": sizes["heads"] * self.head_dim, "k_norm": sizes["kv_heads"] * self.head_dim}
        after = {"attention_post_norm": sizes["width"], "mlp_post_norm": sizes["width"]}
        return after | (heads if self.head_norm else {})


NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
    "q_norm": BEFORE["q_norm"],
    "k_norm": BEFORE["k_norm"],
}


def _read(config: ConfigReader, depth: int) -> dict[str, Any]:
    found = {"architecture/head_norm": True}
    if config.kind == "olmo2":
        return found
    if not config.values.get("rope_parameters") and config.real("rope_theta", LOCAL_BASE) != LOCAL_BASE:
        # transformers 4 gave it to all layers, 5.22 to full ones alone
        raise config.refuse(
            "rope_theta",
            "versions of transformers differ on whether sliding layers have it too. Write rope_parameters, with "
            "full_attention and sliding_attention.",
        )
    return found | config.sliding(depth, [(layer + 1) % 4 != 0 for layer in range(depth)])


def _write(model: Olmo) -> dict[str, Any]:
    # their masks are made for both kinds of layers, so a window is always said
    return {"sliding_window": model.sliding_window or WINDOW, "layer_types": layer_types(model.shape.windows)}


def _says(model: Olmo) -> dict[str, bool]:
    return {"architecture.head_norm": model.head_norm}


SHARED = {"rms_norm_eps": 1e-5}
hf_types.register("olmo2")(
    HFType(
        "Olmo2ForCausalLM",
        "olmo",
        SHARED,
        norms=NORMS,
        read=_read,
        says=lambda model: _says(model) | {"model.sliding_window": not model.sliding_window},
    )
)
hf_types.register("olmo3")(
    HFType(
        "Olmo3ForCausalLM",
        "olmo",
        {**SHARED, "sliding_window": WINDOW},
        norms=NORMS,
        rotary=(LOCAL_BASE, LOCAL_BASE),
        read=_read,
        write=_write,
        says=_says,
    )
)

"""The olmoe family: a llama with experts whose queries and keys are normed over all their heads at once."""

from __future__ import annotations

from typing import Any

from bessemer.config import field
from bessemer.models.llama import Llama
from bessemer.models.mixtral import QWEN_NAMES, read_experts, write_experts
from bessemer.models.moe import BALANCES, SCORES
from bessemer.models.protocol import ConfigReader, HFType
from bessemer.registry import hf_types, models


@models.register("olmoe")
class Olmoe(Llama):
    """OLMoE: 64 experts, 8 of them active, softmax scores as they are, an auxiliary loss."""

    hf_type: str = field("model/hf_type", default="auto", choices=("auto", "olmoe"), help="model_type of an export")
    experts: int = field("model/experts", default=64, minimum=0, help="experts of a feed-forward layer; 0 = one, dense")
    experts_active: int = field("model/experts_active", default=8, minimum=1, help="experts that a token uses")
    expert_score: str = field(
        "architecture/experts/score", default="softmax", choices=SCORES, help="scores of experts from router logits"
    )
    expert_normalize: bool = field(
        "architecture/experts/normalize", default=False, help="weights of a token's experts sum to 1"
    )
    expert_balance: str = field(
        "architecture/experts/balance",
        default="loss",
        choices=BALANCES,
        help="how experts get equal shares of tokens: a bias moved after each step, an auxiliary loss, or not at all",
    )
    head_norm: bool = field(
        "architecture/head_norm", default=True, help="norm with weights of all queries and of all keys of a token"
    )

    @property
    def natural_type(self) -> str:
        return "olmoe"

    def norm_sizes(self) -> dict[str, int]:
        sizes = self.sizes()
        heads = {"q_norm": sizes["heads"] * self.head_dim, "k_norm": sizes["kv_heads"] * self.head_dim}
        return {**super().norm_sizes(), **(heads if self.head_norm else {})}


def _read(config: ConfigReader, depth: int) -> dict[str, Any]:
    if config.real("clip_qkv", None) is not None:
        raise config.refuse("clip_qkv", "clipped queries, keys and values are not supported.")
    normalize = config.flag("norm_topk_prob")
    return {**read_experts(config, "intermediate_size", normalize), "architecture/head_norm": True}


def _write(model: Olmoe) -> dict[str, Any]:
    written = write_experts(model, "num_experts", "intermediate_size")
    return {**written, "norm_topk_prob": model.expert_normalize, "clip_qkv": None}


def _says(model: Olmoe) -> dict[str, bool]:
    sizes = model.sizes()
    return {
        "architecture.head_norm": model.head_norm,
        "model.sliding_window": not model.sliding_window,
        "model.head_dim": sizes["heads"] * sizes["head_dim"] == sizes["width"],
    }


hf_types.register("olmoe")(
    HFType(
        "OlmoeForCausalLM",
        "olmoe",
        {
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "router_aux_loss_coef": 0.01,
        },
        experts=QWEN_NAMES,
        read=_read,
        write=_write,
        says=_says,
    )
)

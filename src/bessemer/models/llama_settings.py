"""The settings of the llama family, its shape, and contradictions among them."""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.config import field
from bessemer.models.checks import check_sizes, check_switches, require
from bessemer.models.headed import HeadedModel
from bessemer.models.rotary import ROPE_TYPES, Rope
from bessemer.models.shape import Shape, round_up

BIASES = ("none", "qkv", "all")
HF_TYPES = ("auto", "llama", "mistral", "qwen2", "qwen3")
DTYPES = ("float32", "bfloat16", "float16")
MLP_MULTIPLE = 64


@dataclass(frozen=True)
class LlamaShape(Shape):
    """All derived sizes of one model of the family; none of GPT's devices."""

    value_embeddings: bool = False
    smear: bool = False
    residual_mix: bool = False
    backout: bool = False
    feed_forward: int = 0
    tied: bool = False
    vectors: int = 0  # parameters of norms and biases

    @property
    def mlp_width(self) -> int:
        return self.feed_forward

    @property
    def remembered(self) -> int:
        return 1  # nothing, but a cache holds an array of it

    def count_parameters(self) -> dict[str, int]:
        """By optimizer group, with `total` and `scaling` (matrices in blocks + head). A tied table is the head."""
        table = self.padded_vocab * self.width
        per_block = self.width * (2 * self.query_width + 2 * self.kv_width + 3 * self.mlp_width)
        counts = {
            "matrix": self.depth * per_block,
            "gate": 0,
            "embedding": 0 if self.tied else table,
            "head": table,
            "rho": self.vectors,
        }
        return {**counts, "total": sum(counts.values()), "scaling": counts["matrix"] + table}


class LlamaSettings(HeadedModel):
    """What differs between llama, mistral, qwen2, qwen3 and smollm is a setting each."""

    mlp_width: int = field(
        "model/mlp_width",
        default=-1,
        minimum=1,
        also=(-1,),
        help="width of the feed-forward layer; -1 = 8/3 of the width, up to 64s",
    )
    tied_head: bool = field("model/tied_head", default=False, help="the head is the embedding table")
    sliding_window: int = field(
        "model/sliding_window",
        default=0,
        minimum=0,
        help="keys a sliding layer attends to; 0 = all layers see all",
    )
    sliding_layers: str = field(
        "model/sliding_layers", default="S", help="S sliding, L full context; tiled over the layers"
    )
    max_positions: int = field(
        "model/max_positions",
        default=-1,
        minimum=1,
        also=(-1,),
        help="context an export declares; -1 = architecture.block_size",
    )
    end_tokens: list[int] = field(
        "model/end_tokens",
        default_factory=list,
        minimum=0,
        help="ids that end a text, besides the tokenizer's",
    )
    hf_type: str = field(
        "model/hf_type",
        default="auto",
        choices=HF_TYPES,
        help="model_type of an export; auto: by the settings",
    )
    weights_dtype: str = field(
        "model/weights_dtype",
        default="float32",
        choices=DTYPES,
        help="dtype of exported weights; training is float32",
    )

    attention_bias: str = field(
        "architecture/attention_bias",
        default="none",
        choices=BIASES,
        help="biases of attention: qkv (qwen2) or all",
    )
    mlp_bias: bool = field("architecture/mlp_bias", default=False, help="biases of the feed-forward layer")
    head_norm: bool = field(
        "architecture/head_norm", default=False, help="norm with weights of each query and key (qwen3)"
    )
    norm_epsilon: float = field("architecture/norm_epsilon", default=1e-5, minimum=0, help="ε of the norms")
    rotary_base: float = field(
        "architecture/rotary_base", default=10_000.0, above=1, help="base of rotary frequencies"
    )
    rope_type: str = field(
        "architecture/rope/type", default="default", choices=ROPE_TYPES, help="scaling of rotary frequencies"
    )
    rope_factor: float = field(
        "architecture/rope/factor", default=1.0, minimum=1, help="context over pretraining's"
    )
    rope_original_length: int = field(
        "architecture/rope/original_length", default=0, minimum=0, help="context of pretraining"
    )
    rope_low_freq_factor: float = field(
        "architecture/rope/low_freq_factor", default=1.0, above=0, help="llama3's low"
    )
    rope_high_freq_factor: float = field(
        "architecture/rope/high_freq_factor", default=4.0, above=0, help="llama3's high"
    )
    rope_beta_fast: float = field("architecture/rope/beta_fast", default=32.0, above=0, help="yarn's β_fast")
    rope_beta_slow: float = field("architecture/rope/beta_slow", default=1.0, above=0, help="yarn's β_slow")
    rope_truncate: bool = field(
        "architecture/rope/truncate", default=True, help="yarn: whole dimensions only"
    )
    rope_attention_factor: float = field(
        "architecture/rope/attention_factor",
        default=0.0,
        minimum=0,
        help="yarn: of queries and keys; 0 = derived",
    )
    rope_mscale: float = field(
        "architecture/rope/mscale", default=0.0, minimum=0, help="yarn: strength; 0 = 1"
    )
    rope_mscale_all_dim: float = field(
        "architecture/rope/mscale_all_dim",
        default=0.0,
        minimum=0,
        help="yarn: divided by that of this strength",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "end_tokens", tuple(self.end_tokens))
        super().__post_init__()

    @property
    def shape(self) -> LlamaShape:
        sizes = self.sizes()
        width, depth = sizes["width"], self.depth
        wide = self.mlp_width if self.mlp_width > 0 else round_up(8 * width // 3, MLP_MULTIPLE)
        window = self.sliding_window or None
        letters = (self.sliding_layers * depth)[:depth]
        queries, keys = sizes["heads"] * self.head_dim, sizes["kv_heads"] * self.head_dim
        biases = {"none": 0, "qkv": queries + 2 * keys, "all": queries + 2 * keys + width}[
            self.attention_bias
        ]
        biases += (2 * wide + width) * self.mlp_bias
        return LlamaShape(
            **sizes,
            windows=tuple(window if letter == "S" else None for letter in letters),
            feed_forward=wide,
            tied=self.tied_head,
            vectors=depth * (2 * width + 2 * self.head_dim * self.head_norm + biases) + width,
        )

    @property
    def rope(self) -> Rope:
        return Rope(
            base=self.rotary_base,
            type=self.rope_type,
            factor=self.rope_factor,
            original_length=self.rope_original_length,
            low_freq_factor=self.rope_low_freq_factor,
            high_freq_factor=self.rope_high_freq_factor,
            beta_fast=self.rope_beta_fast,
            beta_slow=self.rope_beta_slow,
            truncate=self.rope_truncate,
            attention_factor=self.rope_attention_factor,
            mscale=self.rope_mscale,
            mscale_all_dim=self.rope_mscale_all_dim,
        )


def check_llama(model: LlamaSettings) -> None:
    """Raise InputError for the first setting that cannot be built, naming it and the remedy."""
    check_sizes(model)
    check_switches(model)
    require(
        model.precision != "fp8",
        "architecture.precision=fp8 is of the gpt family: its bounds rest on norms without weights. Use auto or bf16.",
    )
    require(
        bool(model.sliding_layers) and set(model.sliding_layers) <= set("SL"),
        f"model.sliding_layers is '{model.sliding_layers}'; it is a pattern of S (sliding) and L (long), such as S.",
    )
    require(model.rotary_base > 1, f"architecture.rotary_base is {model.rotary_base}; it must be above 1.")
    kind, length = model.rope_type, model.rope_original_length
    require(
        kind not in ("llama3", "yarn", "dynamic") or length > 0,
        f"architecture.rope.type={kind} needs architecture.rope.original_length, the context of pretraining.",
    )
    require(
        kind != "dynamic" or model.block_size <= length,
        f"architecture.rope.type=dynamic is offered up to the pretrained context of {length} tokens, beyond which its "
        f"angles would change while a text grows; set architecture.block_size={length} or less.",
    )
    require(
        kind != "llama3" or model.rope_high_freq_factor > model.rope_low_freq_factor,
        "architecture.rope.high_freq_factor must be above architecture.rope.low_freq_factor.",
    )

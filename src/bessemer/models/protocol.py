"""What a model must provide (`Model`), what it may provide (the protocols), and the base of models of your own.

A capability is asked for with isinstance: `isinstance(model, Decoding)` is true of any model that has the methods.

For each model_type of Hugging Face, a family registers one `HFType` in the file that holds its model. It tells
`interop` about its config.json and the names of its weights:

    hf_types.register("olmo2")(HFType("Olmo2ForCausalLM", "olmo", read=…, write=…, says=…, norms=…))

`interop` reads and writes what all of them share: sizes, the rotary table, tokens, the names of matrices.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as plain_field
from typing import Any, Protocol, runtime_checkable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bessemer.config import field
from bessemer.errors import InputError
from bessemer.losses.cross_entropy import Projection, join_further, logits_loss, target_weights
from bessemer.losses.token_scores import policy_scores, token_logprobs, token_scores
from bessemer.topology import unbox

Batch = Mapping[str, Array]
GroupOf = Callable[[tuple[str, ...]], str]  # path of a parameter → its optimizer group


class Model(nn.Module, ABC):
    """A subclass provides `vocab_size`, `block_size` and the abstract methods; token scores follow from `projection`.

    Parameters made with `nn.with_logical_partitioning(init, axes)` are sharded by those axes, the others replicated.
    There are no dataclass fields here: a base class's fields would come first among the settings of every family.
    """

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Longest sequence, in tokens."""

    @abstractmethod
    def __call__(
        self,
        input_ids: Array,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        deterministic: bool = True,
    ) -> Array:
        """Return logits (B, T, V). input_ids, positions, segment_ids: (B, T); docs/data-plans.md describes them."""

    @abstractmethod
    def projection(self, batch: Batch, deterministic: bool = True) -> Projection:
        """Return hidden states and head, or the logits: for losses that compare whole distributions."""

    @abstractmethod
    def loss(
        self,
        batch: Batch,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        deterministic: bool = True,
        embedding_noise: float = 0.0,
        further: Array | None = None,
    ) -> tuple[Array, Array, dict[str, Array]]:
        """Return (Σ w·loss, Σ w, {"nll": Σ w·nll}). w is `loss_mask` (1 without one), 0 where the target is below 0.

        further: (n,), weights of the losses of n more tokens ahead (`losses.cross_entropy`); their mean nll is
        "further_nll".
        """

    @abstractmethod
    def count_parameters(self) -> dict[str, int]:
        """Return parameters by optimizer group, with "total" and "scaling" (those that multiply activations)."""

    @abstractmethod
    def flops_per_token(self, block_size: int | None = None, causal: bool = False) -> float:
        """Return training FLOPs per token; `causal` counts only attended keys."""

    def token_logprobs(self, batch: Batch, deterministic: bool = True) -> Array:
        """Return log p(target), (B, T) float32; 0 where the target is below 0."""
        return token_logprobs(self.projection(batch, deterministic), batch["target_ids"])

    def token_scores(self, batch: Batch, deterministic: bool = True) -> tuple[Array, Array]:
        """Return (log p(target), whether the target is the argmax), (B, T) each; (0, True) without a target."""
        return token_scores(self.projection(batch, deterministic), batch["target_ids"])

    def policy_scores(
        self, batch: Batch, temperature: float = 1.0, deterministic: bool = True, entropy_gradient: bool = False
    ) -> tuple[Array, Array]:
        """Return (log π(target), entropy of π), (B, T) each; 0 without a target. π = softmax(logits / temperature).

        The entropy is differentiable with `entropy_gradient` alone."""
        projection = self.projection(batch, deterministic)
        return policy_scores(projection, batch["target_ids"], temperature, entropy_gradient)


@runtime_checkable
class Decoding(Protocol):
    """Generates text: previews, `bessemer sample`, RL. A cache is any tree of arrays that have the rows first."""

    vocab_size: int
    block_size: int

    def init_cache(self, batch: int, length: int) -> Any:
        """Return an empty cache for `batch` rows of up to `length` tokens each; every leaf is (batch, …)."""

    def decode(
        self, input_ids: Array, cache: Any, lengths: Array | None = None, last_only: bool = False
    ) -> tuple[Array, Any]:
        """Append n tokens to every row; return (logits (B, n, V), the new cache).

        input_ids: (B, n), right-padded. lengths: (B,), how many of a row's n tokens are real; None: all of them.
        last_only: the logits of each row's last real token alone, (B, 1, V).
        """


def check_decodes(model: Any) -> None:
    """Raise InputError for a model that cannot write text."""
    if not isinstance(model, Decoding):
        raise InputError(
            f"a model of class {type(model).__name__} cannot write text: it has no `decode` and `init_cache` "
            "(docs/extending.md). It can be evaluated on text: bpb."
        )


@runtime_checkable
class Rewinding(Decoding, Protocol):
    """Takes back tokens that `decode` appended, which speculative decoding needs."""

    most_rewound: int  # tokens that one call may append, if some of them are to be taken back

    def rewind(self, cache: Any, before: Any, input_ids: Array, kept: Array) -> Any:
        """Return `cache`, which `decode` made of `before` and input_ids (B, n), with only the first `kept` (B,) of the
        appended tokens."""


@runtime_checkable
class Shortening(Decoding, Protocol):
    """Cuts the rows of a cache, which the engine needs to re-use part of what a row left behind."""

    most_rewound: int  # rows of at most so many tokens can be cut

    def shorten(self, cache: Any, last: Array, lengths: Array) -> Any:
        """Return `cache` with only the first `lengths` (B,) tokens of every row; last: (B,), the last of them."""


@runtime_checkable
class Scoring(Protocol):
    """Scores given tokens, which multiple-choice evaluations need."""

    block_size: int

    def token_scores(self, batch: Batch, deterministic: bool = True) -> tuple[Array, Array]: ...


@runtime_checkable
class ValueModel(Protocol):
    """Judges text: one number per position, (B, T)."""

    def values(self, batch: Batch, deterministic: bool = True) -> Array: ...


@runtime_checkable
class Grouped(Protocol):
    """Names the optimizer group of each parameter ("matrix", "embedding", …); otherwise names and shapes decide."""

    def group_of(self, path: tuple[str, ...]) -> str: ...


@runtime_checkable
class Adaptable(Grouped, Protocol):
    """Computes with adapters beside its matrices (`lora.Adapted`) and with frozen parameters in its compute dtype."""

    projected_groups: tuple[str, ...]  # groups whose matrices are used in plain products alone, which take adapters
    cast_groups: tuple[str, ...]  # groups that every use casts to the compute dtype: frozen, they are stored in it
    compute_dtype: Any


@runtime_checkable
class Checked(Protocol):
    """Raises InputError for contradictory settings, before anything is compiled."""

    def check(self) -> None: ...


@runtime_checkable
class KernelChoice(Protocol):
    """Returns setting → (kernel that runs on this platform and mesh, reason)."""

    def chosen_kernels(self) -> dict[str, tuple[str, str]]: ...


@runtime_checkable
class HasPrecision(Protocol):
    """Names the precision of its matrix products: float32, bf16, fp8 or auto."""

    precision: str


@runtime_checkable
class SilentAtStart(Protocol):
    """Names parameters whose gradient is only rounding noise in a fresh model; step 0 uses exactly 0 for them."""

    silent_at_start: tuple[str, ...]


@runtime_checkable
class NewParameters(Protocol):
    """Names top-level parameters that the weights of `init` may lack; they keep their fresh values."""

    new_parameters: tuple[str, ...]


def group_of(model: nn.Module) -> GroupOf | None:
    return model.group_of if isinstance(model, Grouped) else None


def new_parameters(model: nn.Module) -> tuple[str, ...]:
    return model.new_parameters if isinstance(model, NewParameters) else ()


class LanguageModel(Model):
    """Base of models of your own: a subclass defines `__call__(input_ids, …) -> logits (B, T, V)`.

    The rest is computed from the logits, which are held in full; GPT's own loss never does that.
    """

    vocab_size: int = field("model/vocab_size", default=-1, minimum=1, also=(-1,), help="tokens; -1 = the tokenizer's")
    block_size: int = field("architecture/block_size", default=512, minimum=1, help="sequence length")

    def __call__(
        self,
        input_ids: Array,
        positions: Array | None = None,
        segment_ids: Array | None = None,
        deterministic: bool = True,
    ) -> Array:
        raise NotImplementedError(f"{type(self).__name__} must define __call__(input_ids, ...) -> logits")

    def projection(self, batch: Batch, deterministic: bool = True) -> Projection:
        positions, segments = batch.get("positions"), batch.get("segment_ids")
        logits = self(batch["input_ids"], positions, segments, deterministic).astype(jnp.float32)
        return Projection(logits, None, logits.shape[-1])

    def loss(
        self,
        batch: Batch,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        deterministic: bool = True,
        embedding_noise: float = 0.0,
        further: Array | None = None,
    ) -> tuple[Array, Array, dict[str, Array]]:
        if embedding_noise:
            raise InputError(
                f"{type(self).__name__} does not say where its embeddings are, so it cannot add noise to them: set "
                "sft.neftune_alpha=0, or give it a `loss` that takes embedding_noise."
            )
        weights, logits = target_weights(batch), self.projection(batch, deterministic).hidden
        loss, nll = logits_loss(logits, batch["target_ids"], label_smoothing, z_loss)
        total, sums = jnp.sum(weights * loss), {"nll": jnp.sum(weights * nll)}
        if further is not None:
            ahead = join_further(batch, further)
            nlls = [logits_loss(logits, ahead.targets[..., n], 0.0, 0.0)[1] for n in range(len(further))]
            each = jnp.sum(ahead.weights * jnp.stack(nlls, axis=-1), axis=(0, 1))
            total, sums["further_nll"] = total + jnp.sum(further * each), jnp.mean(each)
        return total, jnp.sum(weights), sums

    def count_parameters(self) -> dict[str, int]:
        counts = {"matrix": 0, "embedding": 0, "scalar": 0}
        ids = jax.ShapeDtypeStruct((1, min(8, self.block_size)), jnp.int32)
        variables: Any = jax.eval_shape(self.init, jax.random.key(0), ids)
        for path, leaf in jax.tree_util.tree_leaves_with_path(unbox(variables["params"])):
            counts[_kind(jax.tree_util.keystr(path), leaf.shape)] += math.prod(leaf.shape)
        return {**counts, "total": sum(counts.values()), "scaling": counts["matrix"]}

    def flops_per_token(self, block_size: int | None = None, causal: bool = False) -> float:
        """6 × matrices. Attention comes on top, in a way only its model knows: override this to count it."""
        return 6.0 * self.count_parameters()["scaling"]


def _kind(path: str, shape: tuple[int, ...]) -> str:
    """Token tables are looked up, not multiplied; whatever has at most one axis is a scale or a bias."""
    if len(shape) < 2:
        return "scalar"
    return "embedding" if "embed" in path.lower() else "matrix"


# --- model_types of Hugging Face ---


class ConfigReader(Protocol):
    """A config.json whose values are checked as they are read (interop.config.HFConfig)."""

    values: Mapping[str, Any]

    @property
    def kind(self) -> str: ...
    def refuse(self, key: str, problem: str) -> InputError: ...
    def whole(self, key: str, default: Any = ..., *, least: int = 1, most: int = ...) -> Any: ...
    def real(self, key: str, default: Any = ...) -> Any: ...
    def flag(self, key: str, default: bool = False) -> bool: ...
    def sliding(self, depth: int, default: Sequence[bool]) -> dict[str, Any]: ...


def nothing(*_: Any) -> dict[str, Any]:
    """Return no settings, no keys: a type that has only what all types have."""
    return {}


BEFORE = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}
"""Names of the norms of a layer whose norms come before attention and feed-forward."""


@dataclass(frozen=True)
class Layout:
    """How files hold a parameter. shape: ours → theirs; to_ours, to_theirs: of arrays."""

    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    to_ours: Callable[[np.ndarray], np.ndarray]
    to_theirs: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class HFType:
    """One model_type.

    defaults: values of keys that a config.json may leave out, as transformers has them; activation: the key of the
    feed-forward's activation and the one value it may have; norms: our name of a layer's norm → theirs; rotary: the
    default bases of full and of sliding layers, for a type whose sliding layers have a rotary table of their own;
    experts: our names of a layer's router and stacks → theirs, {} standing for the number of the expert; whole: our
    names of parameters of a layer that files hold in our layout, stacks in one tensor → their full names; layouts:
    those of them that files hold in a third one; matrices: our names of further matrices → theirs; partial_rotary:
    positions may turn a part of each head; text_of: the multi-modal model_type that holds this one in `text_config`;
    left_out: beginnings of the names of tensors that are not read → what they are.
    read: (config.json, layers) → settings beyond the common ones; write: model → keys beyond the common ones;
    says: model → setting → whether a config.json of this type can say it.
    """

    architecture: str
    family: str
    defaults: Mapping[str, Any] = plain_field(default_factory=dict)
    activation: tuple[str, str] = ("hidden_act", "silu")
    norms: Mapping[str, str] = plain_field(default_factory=lambda: BEFORE)
    rotary: tuple[float, float] | None = None
    experts: Mapping[str, str] = plain_field(default_factory=dict)
    whole: Mapping[str, str] = plain_field(default_factory=dict)
    layouts: Mapping[str, Layout] = plain_field(default_factory=dict)
    matrices: Mapping[str, str] = plain_field(default_factory=dict)
    partial_rotary: bool = False
    text_of: str = ""
    left_out: Mapping[str, str] = plain_field(default_factory=dict)
    read: Callable[[ConfigReader, int], dict[str, Any]] = nothing
    write: Callable[[Any], dict[str, Any]] = nothing
    says: Callable[[Any], dict[str, bool]] = nothing


def layer_types(windows: Sequence[int | None]) -> list[str]:
    """Return `layer_types` of a config.json for layers with these windows."""
    return ["full_attention" if window is None else "sliding_attention" for window in windows]

"""The settings `generate.*`: how a run's sampler decodes; options of `bessemer sample`, `chat` and `serve`."""

from __future__ import annotations

from dataclasses import dataclass

from bessemer.config import field
from bessemer.generate.speculate import DRAFT, NGRAM, Speculation
from bessemer.kernels.quantized import SAMPLING_KINDS

SPECULATE = ("none", "ngram")
WEIGHTS = ("auto", *SAMPLING_KINDS)


@dataclass
class DecodingSettings:
    """Of rollouts: each changes how fast text is made; `sampling_weights` also changes the sampler's distribution."""

    speculate: str = field(
        "generate/speculate",
        default="none",
        choices=SPECULATE,
        help="ngram: drafts from the text itself, several tokens verified in one pass; the text is the same",
    )
    draft: int = field("generate/draft", default=DRAFT, minimum=1, maximum=64, help="tokens of a draft")
    ngram: int = field(
        "generate/ngram",
        default=NGRAM,
        minimum=1,
        maximum=16,
        help="a draft follows the latest place with the most last tokens in common, at most so many",
    )
    sampling_weights: str = field(
        "generate/weights",
        default="auto",
        choices=WEIGHTS,
        help="matrices that sampling reads: auto = in the compute dtype; fp8 (e4m3) or int8 with a scale per output "
        "column: 1 byte per weight",
    )

    @property
    def speculation(self) -> Speculation | None:
        return Speculation.of(self.speculate, self.draft, self.ngram)

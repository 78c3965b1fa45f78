"""What a tokenizer is trained on: the texts of the sources, or of large ones an even sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bessemer.data.chat import spoken
from bessemer.data.permutation import permute
from bessemer.data.preference import texts_of
from bessemer.data.prepare import documents_of
from bessemer.data.readers import Bad, Document, read_piece
from bessemer.data.sources import Files, Source, plan_shards
from bessemer.errors import InputError

SAMPLE_BYTES = 32 << 20  # text a tokenizer is trained on
SAMPLE_SHARD = 1 << 20  # a larger corpus is sampled in pieces of this size


def sample_texts(
    sources: Sequence[Source], text_key: str | None = None, limit: int = SAMPLE_BYTES
) -> Iterator[str]:
    """Texts of the sources, about `limit` bytes in all; of larger ones a sample of pieces spread over them.

    What cannot be read is left out here, since preparing the data judges it; but if nothing is left, that is said.
    """
    share = limit // max(1, len(sources))
    wrong: Bad | None = None
    found = 0
    for source in sources:
        used = 0
        for text in _texts(source, text_key):
            if isinstance(text, Bad):
                wrong = wrong or text
                continue
            yield text
            used += len(text)
            if used >= share:
                break
        found += used
    if not found:
        labels = ", ".join(source.label for source in sources)
        raise InputError(
            f"there is no text to train a tokenizer on: {wrong or f'{labels} hold no documents'}."
        )


def _texts(source: Source, text_key: str | None) -> Iterator[str | Bad]:
    if isinstance(source, Files):
        shards = plan_shards(source, SAMPLE_SHARD)
        order = permute(range(len(shards)), len(shards), 0).tolist()
        reads: Iterator[Document | Bad] = (
            read for i in order for piece in shards[i] for read in read_piece(piece, text_key)
        )
    else:
        reads = documents_of(source.items, text_key)
    for read in reads:
        if isinstance(read, Bad):
            yield read
        elif read.messages:
            yield spoken(read.messages)
        elif read.text:
            yield read.text
        elif read.pair is not None:
            yield from texts_of(read.pair)

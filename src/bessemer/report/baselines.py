"""What general compressors make of the same text: a model that needs more bits than xz has learnt little.

bits per byte = 8 · compressed bytes / bytes
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterable

GZIP = 16 + zlib.MAX_WBITS  # the gzip container, as `gzip -9` writes it (without a file name)


def baselines(data: bytes | Iterable[bytes]) -> dict[str, float]:
    """Bits per byte of `gzip -9` ("gzip") and `xz -9e` ("xz") on bytes, or on pieces of them; {} for none."""
    deflate = zlib.compressobj(9, zlib.DEFLATED, GZIP, 9)
    xz = lzma.LZMACompressor(preset=9 | lzma.PRESET_EXTREME)
    total = gzip_size = xz_size = 0
    for piece in [data] if isinstance(data, bytes) else data:
        total += len(piece)
        gzip_size += len(deflate.compress(piece))
        xz_size += len(xz.compress(piece))
    if total == 0:
        return {}
    gzip_size += len(deflate.flush())
    xz_size += len(xz.flush())
    return {"gzip": 8 * gzip_size / total, "xz": 8 * xz_size / total}

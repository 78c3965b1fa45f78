"""`hf:OWNER/NAME[@REVISION]`: a model of the Hugging Face hub, downloaded once into that program's own cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from bessemer.errors import InputError, StorageError, to_install

PREFIX = "hf:"
NEEDED = ("*.json", "*.safetensors", "*.jinja")
"""Configuration, tokenizer, template and weights; nothing that is code or a pickle."""


def is_hub(source: str) -> bool:
    return source.startswith(PREFIX)


def fetched(source: str) -> Path:
    """The local folder of a model on the hub. HF_HUB_CACHE, HF_HUB_OFFLINE and HF_TOKEN mean what they mean there."""
    named = re.fullmatch(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", source)
    if named is None:
        raise InputError(f"'{source}' is not hf:OWNER/NAME or hf:OWNER/NAME@REVISION.")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise InputError(
            f"{source} needs the extra `hf`: {to_install('hf')}. Or download the folder yourself."
        ) from error
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    try:
        return Path(
            snapshot_download(
                named[1],
                revision=named[2],
                allow_patterns=list(NEEDED),
                cache_dir=os.environ.get("HF_HUB_CACHE"),
                local_files_only=offline,
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise StorageError(
            f"{source} cannot be fetched: {reason}. Check the name, the network, HF_HUB_OFFLINE, and HF_TOKEN for a "
            "model behind a licence; or download the folder yourself and name that."
        ) from error

"""A tokenizer as transformers wants it: tokenizer.json, and tokenizer_config.json with names and the chat template."""

from __future__ import annotations

import json
from typing import Any

from bessemer.data.chat import TURN_TOKENS, can_chat, stop_ids
from bessemer.data.templates import CONFIG, OUR_TEMPLATE
from bessemer.data.tokenizer import FILE, Tokenizer
from bessemer.models.llama_settings import LlamaSettings


def token_ids(model: LlamaSettings, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """bos_token_id, eos_token_id and pad_token_id, as config.json and generation_config.json hold them."""
    ends = list(model.end_tokens)
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": _one(ends), "pad_token_id": None}
    if not ends:
        turn = stop_ids(tokenizer) if can_chat(tokenizer) else ()
        ends = list(dict.fromkeys([tokenizer.bos_id, *turn]))
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": _one(ends), "pad_token_id": tokenizer.pad_id}


def _one(ids: list[int]) -> int | list[int] | None:
    return ids if len(ids) > 1 else ids[0] if ids else None


def tokenizer_files(tokenizer: Tokenizer, ids: dict[str, Any], positions: int) -> dict[str, str]:
    """File name → text. A tokenizer that came with a template keeps the names that came with it, and only those: a bos
    that it did not have would be put before every text."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": positions,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.chat_template is not None:
        config |= {**tokenizer.chat_template.tokens, "chat_template": tokenizer.chat_template.source}
    else:
        config |= _names(tokenizer, ids)
        if all(name in tokenizer.specials for name in TURN_TOKENS):
            config["chat_template"] = OUR_TEMPLATE
    return {FILE: tokenizer.to_json(), CONFIG: json.dumps(config, indent=2, ensure_ascii=False) + "\n"}


def _names(tokenizer: Tokenizer, ids: dict[str, Any]) -> dict[str, str]:
    names = {index: name for name, index in tokenizer.specials.items()}
    ends = ids["eos_token_id"]
    wanted = {
        "bos_token": ids["bos_token_id"],
        "eos_token": ends[0] if isinstance(ends, list) else ends,
        "pad_token": ids["pad_token_id"],
    }
    return {name: names[index] for name, index in wanted.items() if index in names}

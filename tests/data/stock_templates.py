"""Chat templates of published models with small tokenizers that have their tokens; templates/README.md says whose."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.data.chat_forms import _bytes

from bessemer.data.tokenize.templates import ChatTemplate
from bessemer.data.tokenize.tokenizer import SPECIAL_TOKENS, Tokenizer

HERE = Path(__file__).parent / "templates"
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added tokens that are not special
Message = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A template; its special tokens, the first of which begins documents; `written`: what the model has to write of an
    answer (reasoning, content), to the end of its turn; `rows`: of three plain exchanges, and with a system message."""

    name: str
    specials: tuple[str, ...]
    tokens: dict[str, str]
    written: Callable[[str, str], str]
    rows: tuple[int, int] = (1, 1)
    system: bool = True
    thinks: bool = False
    thinking: str = ""  # the key of reasoning, of a template that does not know its tags in a content
    calls: bool = False

    @property
    def source(self) -> str | None:
        """The text of the template; None if it is TRL's and that is not installed."""
        if self.name.startswith("trl/"):
            found = importlib.util.find_spec("trl")
            folder = Path(found.origin).parent / "chat_templates" if found is not None and found.origin else None
            return None if folder is None else (folder / f"{self.name[4:]}.jinja").read_text(encoding="utf-8")
        return (HERE / f"{self.name}.jinja").read_text(encoding="utf-8")

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        assert self.source is not None
        return Tokenizer(tokenizer_json(self.specials), self.name, ChatTemplate(self.source, self.tokens, self.name))


@functools.cache
def tokenizer_json(specials: tuple[str, ...]) -> str:
    """A small byte-level tokenizer with these special tokens, and the tags of thinking and tool calls as plain ones."""
    described = json.loads(_bytes().to_json())
    described["added_tokens"] = []
    vocabulary = described["model"]["vocab"]
    for ours in SPECIAL_TOKENS:
        del vocabulary[ours]
    used = sorted(vocabulary, key=vocabulary.get)
    described["model"]["vocab"] = {token: number for number, token in enumerate(used)}
    for name in (*specials, *TAGS):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        number = len(used) + len(described["added_tokens"])
        described["added_tokens"].append({"id": number, "content": name, **flags, "special": name not in TAGS})
    return json.dumps(described, ensure_ascii=False)


def _after_thinking(reasoning: str, content: str) -> str:
    return f"{reasoning}\n</think>\n\n{content}<｜end▁of▁sentence｜>"


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
IM_END = {"eos_token": "<|im_end|>"}
PHI = ("<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>")
PHI_END = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
DEEPSEEK_END = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
LLAMA_END = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
GEMMA_END = {"bos_token": "<bos>", "eos_token": "<eos>"}
HARMONY = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|start|>",
    "<|message|>",
    "<|channel|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
)
HARMONY_END = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"}
V1 = ("<s>", "</s>")
NEMO = (*V1, "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]")
S_END = {"bos_token": "<s>", "eos_token": "</s>"}


def _im_end(reasoning: str, content: str) -> str:
    return f"{content}<|im_end|>"


def _return(reasoning: str, content: str) -> str:
    thought = f"<|channel|>analysis<|message|>{reasoning}<|end|><|start|>assistant" if reasoning else ""
    return f"{thought}<|channel|>final<|message|>{content}<|return|>"


def _eot(reasoning: str, content: str) -> str:
    return f"{content.strip()}<|eot_id|>"


def _end_of_turn(reasoning: str, content: str) -> str:
    return f"{content.strip()}<end_of_turn>"


FAMILIES = (
    Family("qwen2_5", CHATML, IM_END, _im_end, calls=True),
    Family("qwen3_instruct_2507", CHATML, IM_END, _im_end, calls=True),
    Family(
        "qwen3",
        CHATML,
        IM_END,
        lambda reasoning, content: f"<think>\n{reasoning}\n</think>\n\n{content}<|im_end|>",
        rows=(3, 3),
        thinks=True,
        calls=True,
    ),
    Family("phi3", PHI, PHI_END, lambda _, content: f"{content}<|end|>"),
    Family("phi3_5", PHI, PHI_END, lambda _, content: f"{content}<|end|>"),
    Family("deepseekv3", DEEPSEEK, DEEPSEEK_END, _after_thinking, rows=(3, 3), thinks=True, calls=True),
    Family("deepseek_r1_distill", DEEPSEEK, DEEPSEEK_END, _after_thinking, rows=(3, 3), thinks=True),
    Family("ours/llama3_2", LLAMA, LLAMA_END, _eot, calls=True),
    Family("ours/gemma3", GEMMA, GEMMA_END, _end_of_turn),
    Family("ours/mistral_v1", V1, S_END, lambda _, content: f" {content}</s>", system=False),
    Family("ours/mistral_nemo", NEMO, S_END, lambda _, content: f"{content}</s>", rows=(1, 3), calls=True),
    Family("ours/smollm2", CHATML, IM_END, _im_end),
    Family(
        "ours/smollm3",
        CHATML,
        IM_END,
        lambda thought, content: (
            f"<think>\n{thought}\n</think>\n\n{content}<|im_end|>" if thought else f"{content}<|im_end|>"
        ),
        thinks=True,
    ),
    Family("ours/gpt_oss", HARMONY, HARMONY_END, _return, rows=(3, 3), thinks=True, thinking="thinking", calls=True),
    Family("trl/llama3", LLAMA, LLAMA_END, _eot),
    Family("trl/llama3_1", LLAMA, LLAMA_END, _eot, calls=True),
    Family("trl/llama3_2", LLAMA, LLAMA_END, _eot, calls=True),
    Family("trl/gemma", GEMMA, GEMMA_END, _end_of_turn, system=False),
    Family("trl/gemma3", GEMMA, GEMMA_END, _end_of_turn),
)

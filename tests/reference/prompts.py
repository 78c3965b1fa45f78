"""Tiny tokenizers in the layouts of the supported families, read by transformers. Makes prompts.json; to run it:

    python tests/reference/prompts.py

Each case is a folder with tokenizer.json and tokenizer_config.json. Stored are the ids that transformers gives to
prompts as text and to a conversation in the folder's template.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

OUT = Path(__file__).with_suffix(".json")
PROMPTS = ["Hello world", " two  spaces ", "x", "Line one\nline two", "naïve 日本 7"]
MESSAGES = [
    {"role": "user", "content": "Hello world"},
    {"role": "assistant", "content": "two words"},
    {"role": "user", "content": "x"},
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token or '' }}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)
LAYOUTS = ("prepend", "metaspace", "metaspace-always", "bytes", "bytes-prefix")
BEGINNINGS = ("file", "none")
"""Whether the post-processor of tokenizer.json puts bos before a text."""


def cases() -> list[dict[str, Any]]:
    """Every layout with and without a beginning in the file, bos_token, add_bos_token and a template."""
    options = itertools.product(LAYOUTS, BEGINNINGS, (True, False), (None, True, False), (True, False))
    return [
        {"layout": layout, "begins": begins, "bos": bos, "add_bos": add_bos, "template": template}
        for layout, begins, bos, add_bos, template in options
    ]


def name_of(case: dict[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in case.items())


def make(folder: Path, case: dict[str, Any]) -> Path:
    """Write the tokenizer of a case."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    layout = case["layout"]
    texts = ["Hello world, hello words and two lines of words. [INST] [/INST]"] * 3
    if layout.startswith("bytes"):
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=layout == "bytes-prefix")
        backend.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        if layout == "prepend":
            backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            scheme = "always" if layout == "metaspace-always" else "first"
            backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    specials = ["<unk>", "<s>", "</s>"]
    learner = trainers.BpeTrainer(
        vocab_size=340,
        show_progress=False,
        special_tokens=[*specials, *(alphabet if "<0x00>" in alphabet else [])],
        initial_alphabet=[] if "<0x00>" in alphabet else alphabet,
    )
    backend.train_from_iterator(texts, learner)
    if case["begins"] == "file":
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    described = json.loads(backend.to_str())
    described["added_tokens"] = [t for t in described["added_tokens"] if t["content"] in specials]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(described, ensure_ascii=False))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    config |= {"bos_token": "<s>" if case["bos"] else None}
    config |= {} if case["add_bos"] is None else {"add_bos_token": case["add_bos"]}
    config |= {"chat_template": TEMPLATE} if case["template"] else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    import transformers

    found: dict[str, Any] = {"transformers": transformers.__version__, "cases": {}}
    with tempfile.TemporaryDirectory() as root:
        for number, case in enumerate(cases()):
            theirs = transformers.AutoTokenizer.from_pretrained(make(Path(root) / str(number), case))
            entry = {"prompts": [theirs(prompt)["input_ids"] for prompt in PROMPTS]}
            if case["template"]:
                text = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
                entry["chat"] = theirs(text, add_special_tokens=False)["input_ids"]
            found["cases"][name_of(case)] = entry
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in found["cases"].items()
    )
    OUT.write_text(f'{{"transformers": {json.dumps(found["transformers"])}, "cases": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()

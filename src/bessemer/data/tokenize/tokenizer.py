"""Text to token ids and back: byte-level BPE, trained here or loaded from any Hugging Face `tokenizer.json`.

The split before BPE is GPT-4's with one change: digits come in groups of one or two, since three-digit numbers would
take a thousand tokens of a small vocabulary. There is no normalizer, and every byte has a token, so
`decode(encode(text)) == text` for any text. Text never becomes a special token: `<|bos|>` in a document is encoded as
those seven characters. A chat template beside the file (tokenizer_config.json) is part of the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bessemer.data.tokenize.templates import CONFIG, ChatTemplate, read_config, token_names
from bessemer.errors import InputError
from bessemer.storage.files import atomic_write, storage
from bessemer.storage.remote import refuse_remote

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


SPECIAL_TOKENS = (
    "<|bos|>",
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|system_start|>",
    "<|system_end|>",
    "<|python_start|>",
    "<|python_end|>",
    "<|output_start|>",
    "<|output_end|>",
    "<|pad|>",
)
SPLIT = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
LONGEST = 1000
"""Letters, signs or spaces in a row that a tokenizer learns from in one piece: merging costs their number squared, and
one line of a million letters would take hours."""
_LONG = re.compile(rf"[^\W\d_]{{{LONGEST}}}|[^\w\s]{{{LONGEST}}}|\s{{{LONGEST}}}")
_SPACES = re.compile(rf"\s{{{LONGEST}}}")

SMALLEST = 256 + len(SPECIAL_TOKENS)
LARGEST = 1 << 20
"""Tokens of a vocabulary that is trained: the library allocates all of them at once and aborts if it cannot."""
MOST_BYTES = 256 << 20
"""Of a tokenizer.json: those in use have at most 40 MiB."""
# What other families call the token a document begins with, and padding; the first one present is used.
BOS_NAMES = (
    "<|bos|>",
    "<|begin_of_text|>",
    "<bos>",
    "<s>",
    "<｜begin▁of▁sentence｜>",
    "<|startoftext|>",
    "<|endoftext|>",
    "</s>",
    "[CLS]",
)
PAD_NAMES = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<｜▁pad▁｜>", "<|endoftext|>")
FILE = "tokenizer.json"
NOT_UNICODE = (
    "the text is not valid Unicode (half of a surrogate pair, or bytes that are not UTF-8): write it as UTF-8."
)


class Tokenizer:
    """A tokenizer and its table of bytes per token. Build one with `train`, `load` or from its JSON text.

    `chat_template`: how its conversations are written; None: with our tokens, where it has them. `published`: it came
    with the weights of its model, so a prompt begins as the file says (its post-processor), not always with bos.
    `named`: the tokens that its tokenizer_config.json names (bos_token, eos_token and so on), by default those of the
    template; they are looked at where none of the usual names of a beginning token is in the vocabulary.
    """

    def __init__(
        self,
        text: str,
        origin: str = FILE,
        chat_template: ChatTemplate | None = None,
        *,
        published: bool = False,
        named: Mapping[str, str] | None = None,
    ) -> None:
        self._text = text
        tokens = named if named is not None else chat_template.tokens if chat_template is not None else {}
        self._named = {name: tokens[name] for name in ("bos_token", "eos_token") if name in tokens}
        self.origin = origin
        self.chat_template = chat_template
        self.published = published
        self._plain = _backend(text, origin)
        self._plain.encode_special_tokens = True  # "<|bos|>" in a document is text, not a control token
        described = json.loads(text)
        self._decoder_kinds = set(re.findall(r'"type": ?"(\w+)"', json.dumps(described.get("decoder"))))
        added = self._plain.get_added_tokens_decoder()  # the ids in use; the file's may be renumbered on loading
        self.specials: dict[str, int] = {token.content: index for index, token in added.items() if token.special}
        self._added = added
        self._vocabulary: dict[str, int] = self._plain.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(self._vocabulary.values(), default=-1) + 1
        self.bos_id: int = self._required(BOS_NAMES)
        self.pad_id: int = next((self._vocabulary[n] for n in PAD_NAMES if n in self._vocabulary), self.bos_id)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load a tokenizer.json, or a directory that holds one, with the chat template beside it."""
        refuse_remote(path, "a tokenizer is read from a local directory", "copy it here first")
        file = Path(path)
        file = file / FILE if file.is_dir() else file
        try:
            _check_size(file)
            text, template = file.read_text(encoding="utf-8"), ChatTemplate.beside(file)
            return cls(text, str(file), template, named=token_names(read_config(file)))
        except FileNotFoundError:
            raise InputError(
                f"no tokenizer at '{path}': expected a {FILE} or a directory with one. Train one with "
                f"`bessemer tokenizer train FILES -o DIR --vocab-size N`."
            ) from None
        except UnicodeDecodeError as error:
            raise InputError(f"'{file}' is not a tokenizer: it is not UTF-8 text ({error.reason}).") from error

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Train byte-level BPE of at most `vocab_size` tokens with specials (fewer if the text has fewer pairs)."""
        from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as Backend

        if vocab_size > LARGEST:
            raise InputError(
                f"vocab size {vocab_size:,} is too large: at most {LARGEST:,} tokens are trained (of models in use the "
                "largest has 262,144)."
            )
        if vocab_size < SMALLEST:
            raise InputError(
                f"vocab size {vocab_size} is too small: 256 bytes and {len(SPECIAL_TOKENS)} special tokens "
                f"need at least {SMALLEST}."
            )
        backend = Backend(models.BPE(byte_fallback=False, fuse_unk=False))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            show_progress=False,
            min_frequency=0,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            special_tokens=list(SPECIAL_TOKENS),
        )
        backend.train_from_iterator(_in_short_words(texts), trainer)
        return cls(backend.to_str(), f"trained, {vocab_size} tokens")

    def save(self, directory: str | Path) -> Path:
        """Write `files` into the directory (made when missing); returns tokenizer.json."""
        folder = Path(directory)
        with storage(f"cannot make the directory {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.files.items():
            atomic_write(folder / name, text)
        return folder / FILE

    @property
    def files(self) -> dict[str, str]:
        """Everything the tokenizer is, by file name: tokenizer.json, and tokenizer_config.json for a template, or for
        the name of a beginning token that stands nowhere else."""
        if self.chat_template is None and not any(name in self._vocabulary for name in BOS_NAMES):
            return {FILE: self._text, CONFIG: json.dumps(self._named, indent=1, sort_keys=True) + "\n"}
        if self.chat_template is None:
            return {FILE: self._text}
        return {FILE: self._text, CONFIG: self.chat_template.to_json()}

    def to_json(self) -> str:
        """Return the contents of tokenizer.json."""
        return self._text

    @cached_property
    def hash(self) -> str:
        """sha256 of the files; part of every store."""
        return hashlib.sha256("".join(self.files.values()).encode()).hexdigest()

    def encode(self, text: str, *, allow_special: bool = False, after: Sequence[int] = ()) -> list[int]:
        """Return the ids of the text, without bos.

        allow_special: names like `<|bos|>` in it become their special ids. after: the ids that stand before it. Some
        tokenizers put a space before a text; one that goes on after another must not get it.
        """
        backend = self._special if allow_special else self._after(after)
        try:
            # `encode` holds Python's global lock and computes offsets that nobody reads; a batch of one does neither
            return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError:  # what the library makes of half a surrogate pair
            raise InputError(NOT_UNICODE) from None

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a text that a model is to continue: what its documents begin with, then the text."""
        return [*self.beginning, *self.encode(text)] or [self.bos_id]

    @cached_property
    def beginning(self) -> tuple[int, ...]:
        """Return the ids before a prompt: bos, or whatever the post-processor of a published tokenizer puts there."""
        if not self.published or SPECIAL_TOKENS[0] in self.specials:  # ours, also in an export that came back
            return (self.bos_id,)
        alone = self._plain.encode("a", add_special_tokens=False).ids
        whole = self._plain.encode("a", add_special_tokens=True).ids
        places = (at for at in range(len(whole)) if whole[at : at + len(alone)] == alone)
        return tuple(whole[: next(places, 0)])

    def as_published(self) -> Tokenizer:
        """Return this tokenizer as that of the published weights it came with."""
        return Tokenizer(self._text, self.origin, self.chat_template, published=True, named=self._named)

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its name."""
        return self._vocabulary.get(token)

    def strips(self, token: str) -> tuple[bool, bool]:
        """Return whether a special token swallows the white space before and after it."""
        added = self._added.get(self._vocabulary.get(token, -1))
        return (added.lstrip, added.rstrip) if added else (False, False)

    @cached_property
    def special_names(self) -> re.Pattern[str]:
        """Return a pattern for the names of special tokens, longest first, since one may begin another."""
        named = {*self.specials, *(self.chat_template.tokens.values() if self.chat_template else ())}
        return re.compile("|".join(map(re.escape, sorted(named, key=len, reverse=True))) or r"(?!)")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without bos."""
        try:
            encoded = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            raise InputError(NOT_UNICODE) from None
        return [one.ids for one in encoded]

    def encode_parts(self, parts: Sequence[str | int]) -> list[list[int]]:
        """Return the ids of each part of one sequence: of an id itself, of a text as `encode` after those before it."""
        if not self.prefix_space:  # what stands before a text does not matter
            texts = iter(self.encode_batch([part for part in parts if isinstance(part, str)]))
            return [next(texts) if isinstance(part, str) else [part] for part in parts]
        encoded: list[list[int]] = []
        last: list[int] = []
        for part in parts:
            encoded.append(self.encode(part, after=last) if isinstance(part, str) else [part])
            last = encoded[-1][-1:] or last
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of the ids; special tokens appear by their names."""
        return self._plain.decode([int(i) for i in ids], skip_special_tokens=False)

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """(vocab_size,) int32: UTF-8 bytes each token stands for; 0 for special tokens and unused ids."""
        table = np.zeros(self.vocab_size, np.int32)
        byte_level = "ByteLevel" in self._decoder_kinds
        special = set(self.specials.values())
        for token, index in self._vocabulary.items():
            if index in special:
                continue
            if index in self._added:
                table[index] = len(token.encode())
            elif byte_level:
                table[index] = len(token)  # one character of the byte alphabet each
            elif re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
                table[index] = 1
            else:
                table[index] = len(token.replace("▁", " ").removeprefix("##").encode())
        return table

    def target_bytes(self, inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the UTF-8 bytes of text that each target stands for, int32; 0 where the target is −1 or special.

        inputs: the token before each target, same shape. The space that the tokenizer itself puts before a text is no
        byte of it.
        """
        lengths = self.token_bytes[np.maximum(targets, 0)]
        if self.prefix_space:
            starts = self._added_ids if self.prefix_space == "always" else np.array([self.bos_id])
            lengths = lengths - (np.isin(inputs, starts) & self._begins_with_space[np.maximum(targets, 0)])
        return np.where(targets >= 0, lengths, 0).astype(np.int32)

    @cached_property
    def prefix_space(self) -> str:
        """Where the tokenizer puts a space of its own: "" (nowhere), "first" (before the text), or "always" (also
        after a special token inside it)."""
        described = json.loads(self._text)
        if _without_prefix_space(described, kinds=("always",)) != described:
            return "always"
        return "first" if _without_prefix_space(described, kinds=("first",)) != described else ""

    @cached_property
    def _begins_with_space(self) -> np.ndarray:
        """(vocab_size,) bool: tokens whose text begins with a space."""
        table = np.zeros(self.vocab_size, bool)
        for token, index in self._vocabulary.items():
            table[index] = token[:1] in ("▁", "Ġ") and index not in self._added
        return table

    @cached_property
    def _added_ids(self) -> np.ndarray:
        return np.array(sorted(self._added), np.int64)

    @cached_property
    def _special(self) -> Backend:
        return _backend(self._text, self.origin)

    def _after(self, ids: Sequence[int]) -> Backend:
        """Return the backend that encodes a text after these ids as the whole would be encoded at once."""
        if not len(ids) or not self.prefix_space:
            return self._plain
        return self._after_special if ids[-1] in self._added else self._after_text

    @cached_property
    def _after_special(self) -> Backend:
        return self._changed(("first",))

    @cached_property
    def _after_text(self) -> Backend:
        return self._changed(("first", "always"))

    def _changed(self, kinds: tuple[str, ...]) -> Backend:
        described = json.loads(self._text)
        backend = _backend(json.dumps(_without_prefix_space(described, kinds)), self.origin)
        backend.encode_special_tokens = True
        return backend

    def _required(self, names: tuple[str, ...]) -> int:
        for name in (*names, *(self._named[key] for key in ("bos_token", "eos_token") if key in self._named)):
            if name in self._vocabulary:
                return self._vocabulary[name]
        raise InputError(
            f"{self.origin} has no token to begin a document with; looked for {', '.join(names)}, and for the "
            f"bos_token and eos_token of a {CONFIG} beside it. Add one of them to its added_tokens as a special token, "
            f"or name the token there."
        )


def _in_short_words(texts: Iterable[str]) -> Iterator[str]:
    """Return the texts, with runs longer than `LONGEST` cut."""
    for text in texts:
        first = 0
        if max(map(len, text.split()), default=0) >= LONGEST or _SPACES.search(text):
            for run in _LONG.finditer(text):
                yield text[first : run.end()]
                first = run.end()
        yield text[first:]


def _without_prefix_space(described: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """Return a described tokenizer without the space that it puts before a text.

    kinds: "first" (Metaspace's scheme of that name), "always" (the others: before a text and after each special token).
    """
    pre, normalizer = described.get("pre_tokenizer"), described.get("normalizer")
    kept = _unprepended(normalizer) if "always" in kinds else normalizer
    return {**described, "pre_tokenizer": _unprefixed(pre, kinds), "normalizer": kept}


def _unprefixed(part: Any, kinds: Sequence[str]) -> Any:
    if not isinstance(part, Mapping):
        return part
    if "pretokenizers" in part:
        return {**part, "pretokenizers": [_unprefixed(below, kinds) for below in part["pretokenizers"]]}
    if part.get("type") == "ByteLevel" and part.get("add_prefix_space") and "always" in kinds:
        return {**part, "add_prefix_space": False}
    if part.get("type") == "Metaspace":
        older = "always" if part.get("add_prefix_space") else "never"  # as files had it before the schemes
        if part.get("prepend_scheme", older) in kinds:
            return {**part, "prepend_scheme": "never", "add_prefix_space": False}
    return part


def _unprepended(part: Any) -> Any:
    """Return a described normalizer without its Prepend; None if nothing is left of it."""
    if not isinstance(part, Mapping):
        return part
    if part.get("type") == "Prepend":
        return None
    if "normalizers" in part:
        left = [_unprepended(below) for below in part["normalizers"]]
        return {**part, "normalizers": [below for below in left if below is not None]}
    return part


def _check_size(file: Path) -> None:
    """Raise InputError for what cannot be a tokenizer.json before it is read: a device, a pipe, gigabytes."""
    facts = file.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise InputError(f"'{file}' is not a tokenizer: it is not a regular file.")
    if facts.st_size > MOST_BYTES:
        raise InputError(
            f"'{file}' is not a tokenizer: it has {facts.st_size:,} bytes, and the largest are below {MOST_BYTES:,}."
        )


def _backend(text: str, origin: str) -> Backend:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_str(text)
    except Exception as error:  # the library raises bare Exception, nothing narrower
        raise InputError(f"'{origin}' is not a readable tokenizer.json: {error}.") from error

"""Bits per byte and loss (nats per token) on held-out text. Compare bits per byte between tokenizers.

    bits per byte = Σ nats / (ln 2 · Σ bytes)      over targets with bytes, so not over special tokens

Held-out sequences come from the saved configuration: the fixed set that training validates on, so evaluating the last
checkpoint repeats the last val_bpb. To compare models with different tokenizers, each reads the held-out documents with
its own tokenizer in windows of its own context, every token scored once, and the denominator is the bytes of the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bessemer import console
from bessemer.config import declared
from bessemer.config.values import Mismatch, convert
from bessemer.data import DataSettings, Sampling, Tokenizer, Validation, open_dataset
from bessemer.data.stores.catalog import found_again, is_code, relocated, relocated_root
from bessemer.errors import InputError
from bessemer.evaluate.scoring import Row, check_batch, on_mesh, replicated, rows_in_a_pass, score
from bessemer.generate import LoadedModel
from bessemer.registry import evaluations

# --- held-out sequences of a run ---


def held_out(loaded: LoadedModel, limit: int | None = None) -> Validation:
    """Return `limit` validation sequences of the run's (last stage's) data; default: as many as in training.

    They are opened once and kept with the model's programs, so a run that evaluates while it trains reads the same set
    each time, even if the files have changed.
    """
    asked = [loaded.config.get(name) for name in ("training", "data")]
    rows: Validation = loaded.program(f"held-out rows {limit} {asked}", lambda: _opened(loaded, limit))
    return rows


def _opened(loaded: LoadedModel, limit: int | None) -> Validation:
    training = section(loaded.config, "training")
    count = limit if limit is not None else int(training.get("validation_steps") or 2048)
    if count < 1:
        raise InputError(f"the limit must be at least 1 sequence; got {count}.")
    if loaded.held_out is not None:
        return Validation([(Sampling("given"), loaded.held_out)], count)
    if loaded.run is not None and "dataset_train" in loaded.run.given_parts():
        raise InputError(
            f"{where(loaded)} was trained on data given from Python, which is not in its configuration, so there are "
            "no held-out sequences to evaluate on. Evaluate while it trains (eval.evaluations with dataset_eval=…)."
        )
    saved = last_mixture(training.get("dataset"), where(loaded))
    mixture = [relocated(sampling, found_again) for sampling in saved]
    for before, now in zip(saved, mixture, strict=True):
        if before != now:
            loaded.notes.append(f"the data {before.name} is gone; held-out sequences are those of {now.name}")
    if loaded.tokenizer is None:
        raise InputError(f"{where(loaded)} has no tokenizer, so its data cannot be opened again.")
    root = section(loaded.config, "data").get("root")
    loaded.check_opened({"training": {"dataset": training.get("dataset")}, "data": {"root": root}})
    settings = data_settings(section(loaded.config, "data"), where(loaded))
    sources = [(sampling, _open(sampling, loaded.tokenizer, settings, loaded.model.block_size)) for sampling in mixture]
    return Validation(sources, count)


def _open(sampling: Sampling, tokenizer: Tokenizer, settings: DataSettings, block_size: int) -> Any:
    if is_code(sampling.name):
        raise InputError(
            f"the dataset '{sampling.name}' is code named by the run, which an evaluation never imports. "
            "Register it first, from Python, under a plain name."
        )
    return open_dataset(sampling, tokenizer, split="val", block_size=block_size, settings=settings)


def last_mixture(saved: Any, where: str) -> list[Sampling]:
    """Return the samplings of the last stage, from the saved value of training/dataset."""
    try:
        stages = convert(saved or [], list[list[Sampling]])
    except Mismatch as error:
        raise InputError(f"{where}: training.dataset cannot be read ({error.problem}).") from error
    if not stages or not stages[-1]:
        raise InputError(
            f"{where} does not say what data it was trained on (training.dataset is empty: the model was "
            "imported, or its data given from Python), so there are no held-out sequences to evaluate on."
        )
    return list(stages[-1])


def data_settings(saved: Mapping[str, Any], where: str) -> DataSettings:
    """Return the DataSettings of the section `data` of a saved configuration."""
    values = {f"data/{name}": value for name, value in saved.items()}
    given = {
        name: setting.check(values[setting.key], where)
        for name, setting in declared(DataSettings).items()
        if setting.key in values
    }
    if given.get("root"):
        given["root"] = relocated_root(given["root"], found_again)
    return DataSettings(**given)


def section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return dict(found) if isinstance(found, Mapping) else {}


def where(loaded: LoadedModel) -> str:
    return str(loaded.run.path) if loaded.run is not None else "this model"


# --- several models on the same text (`bessemer compare --common`) ---


class Measured(NamedTuple):
    """One model on one text: `nats` and `sizes` (bytes) per document."""

    nats: np.ndarray
    sizes: np.ndarray

    @property
    def bpb(self) -> float:
        return float(self.nats.sum() / (math.log(2) * self.sizes.sum()))

    @property
    def error(self) -> float | None:
        """Return the standard error over documents."""
        return _error(self.nats - self.bpb * math.log(2) * self.sizes, self.sizes)

    def above(self, other: Measured) -> tuple[float, float | None]:
        """Return the difference in bits per byte and its standard error, paired by document."""
        gap = self.bpb - other.bpb
        return gap, _error(self.nats - other.nats - gap * math.log(2) * self.sizes, self.sizes)


def _error(residuals: np.ndarray, sizes: np.ndarray) -> float | None:
    count = len(sizes)
    if count < 2:
        return None
    return float(math.sqrt((residuals**2).sum() * count / (count - 1)) / (math.log(2) * sizes.sum()))


def held_out_documents(loaded: LoadedModel, limit: int | None = None) -> list[str]:
    """Return the documents that the run holds out: adjacent sequences joined, then split where documents begin."""
    tokenizer = loaded.tokenizer
    assert tokenizer is not None
    rows = held_out(loaded, limit)
    pieces: list[list[int]] = []
    before: tuple[int, int] | None = None
    for place in np.lexsort((rows.index, rows.source)):
        row = rows.batch(int(place), 1)
        if "target_ids" not in row:
            raise InputError(f"{where(loaded)} holds out pairs, not text: --common compares models on plain text.")
        targets = row["target_ids"][0]
        if not row["loss_mask"][0][targets >= 0].all():
            raise InputError(
                f"{where(loaded)} holds out conversations, of which only the answers count: --common compares models "
                "on plain text."
            )
        here = (int(rows.source[place]), int(rows.index[place]))
        if before is None or here != (before[0], before[1] + 1):
            pieces.append([])
        before = here
        for token in targets[targets >= 0].tolist():
            if token == tokenizer.bos_id:
                pieces.append([])
            else:
                pieces[-1].append(token)
    texts = [tokenizer.decode(piece).replace("\N{REPLACEMENT CHARACTER}", "") for piece in pieces if piece]
    found = [text for text in texts if text.strip()]
    if not found:
        raise InputError(f"{where(loaded)} holds out no text.")
    return found


def measure_on(loaded: LoadedModel, texts: Sequence[str], batch_size: int | None = None) -> Measured:
    """Score `loaded` on these documents."""
    tokenizer, block = loaded.tokenizer, loaded.model.block_size
    if tokenizer is None:
        raise InputError(f"{where(loaded)} has no tokenizer.")
    windows: list[Row] = []
    owners: list[int] = []
    for number, text in enumerate(texts):
        ids = [tokenizer.bos_id, *tokenizer.encode(text)]
        for start in range(0, len(ids) - 1, block):
            windows.append(Row(ids[start : start + block + 1], 1))
            owners.append(number)
    nats = np.zeros(len(texts))
    np.add.at(nats, owners, [one.nats for one in score(loaded, windows, batch_size)])
    return Measured(nats, np.array([len(text.encode()) for text in texts], float))


# --- bits per byte ---


@evaluations.register("bpb")
def bpb(loaded: LoadedModel, *, limit: int | None = None, batch_size: int | None = None) -> dict[str, Any]:
    """Return bits per byte, loss and perplexity. `limit`: sequences in total; `batch_size`: per pass, all devices."""
    rows = held_out(loaded, limit)
    totals = measure(loaded, rows, batch_size)
    if totals["bytes"] == 0:
        raise InputError("no target of the held-out sequences stands for a byte: bits per byte are not defined.")
    return {
        "metric": "bits per byte",
        "value": totals["nats"] / (math.log(2) * totals["bytes"]),
        "standard_error": standard_error(totals),
        "loss": totals["loss"] / totals["weight"],
        **_counts(rows, totals),
        "bytes": int(totals["bytes"]),
    }


@evaluations.register("loss")
def loss(loaded: LoadedModel, *, limit: int | None = None, batch_size: int | None = None) -> dict[str, Any]:
    """Return nats per token and perplexity; arguments as of `bpb`."""
    rows = held_out(loaded, limit)
    totals = measure(loaded, rows, batch_size)
    return {"metric": "nats per token", "value": totals["loss"] / totals["weight"], **_counts(rows, totals)}


def _counts(rows: Validation, totals: Mapping[str, float]) -> dict[str, Any]:
    perplexity = math.exp(totals["loss"] / totals["weight"])
    return {"perplexity": perplexity, "sequences": len(rows), "targets": int(totals["weight"])}


def measure(loaded: LoadedModel, rows: Validation, batch_size: int | None = None) -> dict[str, float]:
    """Return Σ loss and Σ weight of all targets, Σ nats and Σ bytes of those with bytes, and the sums of their error.

    The device sums single rows, and the host adds those exactly, so the batch size does not matter.
    """
    check_batch(batch_size)
    size = rows_in_a_pass(loaded, loaded.model.block_size, batch_size)
    run = loaded.program("row_sums", lambda: _compiled(loaded))
    found = []
    with loaded.scope():
        for number, batch in enumerate(batches(loaded, rows, size), start=1):
            found.append(run(loaded.params, batch))
            console.tick(min(number * size, len(rows)), len(rows))
        table = np.concatenate(loaded.fetch(found), axis=1)
    nats, size = table[2].astype(np.float64), table[3].astype(np.float64)
    sums = {"nats_nats": nats * nats, "nats_bytes": nats * size, "bytes_bytes": size * size, "rows": size > 0}
    named = zip(("loss", "weight", "nats", "bytes"), table, strict=True)
    return {name: math.fsum(row) for name, row in (*named, *sums.items())}


def standard_error(sums: Mapping[str, float]) -> float | None:
    """Return the standard error of bits per byte over sequences, from sums over them; None for fewer than two.

    With R = Σ nats / Σ bytes it is √(n / (n − 1) · Σ (nats − R · bytes)²) / (ln 2 · Σ bytes): the error of a ratio of
    sums. It treats sequences as independent, so it is too small for text from few documents.
    """
    rows, size = sums.get("rows", 0), sums.get("bytes", 0)
    if rows < 2 or not size:
        return None
    ratio = sums["nats"] / size
    squares = sums["nats_nats"] - 2 * ratio * sums["nats_bytes"] + ratio**2 * sums["bytes_bytes"]
    return math.sqrt(max(0.0, squares) * rows / (rows - 1)) / (math.log(2) * size)


def _compiled(loaded: LoadedModel) -> Any:
    model = loaded.model

    def row_sums(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logprobs = model.apply({"params": params}, batch, method="token_logprobs")  # (B, T)
        weights = jnp.where(batch["target_ids"] >= 0, batch["loss_mask"], 0.0)
        counted = weights * (batch["target_bytes"] > 0)
        parts = (-logprobs * weights, weights, -logprobs * counted, counted * batch["target_bytes"])
        return jnp.stack([part.sum(axis=1) for part in parts])  # (4, B)

    return jax.jit(row_sums, out_shardings=replicated(loaded))


def batches(loaded: LoadedModel, rows: Validation, batch_size: int) -> Iterator[dict[str, Any]]:
    """Yield batches of one shape with the bytes of each target; the last is filled with rows without targets."""
    assert loaded.tokenizer is not None
    for number in range(rows.batches(batch_size)):
        batch: dict[str, Any] = dict(rows.batch(number, batch_size))
        batch["target_bytes"] = loaded.tokenizer.target_bytes(batch["input_ids"], batch["target_ids"])
        yield on_mesh(loaded, batch)

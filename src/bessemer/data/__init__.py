"""Data: sources → tokenizer → store → rows → mixture → batch(step).

Nothing here imports JAX: preparation workers stay small, and batches are plain host arrays.
"""

from bessemer.data.plan.batches import BatchPlan, DataPlan, Prefetcher, Validation, key_of, permute
from bessemer.data.plan.mixture import Sampling, check_mixture, shares_of
from bessemer.data.rows.build import make_rows, store_of
from bessemer.data.rows.rows import ArrayStore, Batch, DatasetStyle, Rows, Store, TokenStore
from bessemer.data.sources.files import Documents, Files, find_files
from bessemer.data.stores.catalog import (
    DataSettings,
    data_root,
    find_source,
    open_dataset,
    open_store,
    rows_of,
    tokenizer_for,
    tokenizer_on,
)
from bessemer.data.stores.prepare import StoreInfo, prepare
from bessemer.data.stores.shards import Progress, show_progress
from bessemer.data.tokenize.tokenizer import SPECIAL_TOKENS, Tokenizer

__all__ = [
    "SPECIAL_TOKENS",
    "ArrayStore",
    "Batch",
    "BatchPlan",
    "DataPlan",
    "DataSettings",
    "DatasetStyle",
    "Documents",
    "Files",
    "Prefetcher",
    "Progress",
    "Rows",
    "Sampling",
    "Store",
    "StoreInfo",
    "TokenStore",
    "Tokenizer",
    "Validation",
    "check_mixture",
    "data_root",
    "find_files",
    "find_source",
    "key_of",
    "make_rows",
    "open_dataset",
    "open_store",
    "permute",
    "prepare",
    "rows_of",
    "shares_of",
    "show_progress",
    "store_of",
    "tokenizer_for",
    "tokenizer_on",
]

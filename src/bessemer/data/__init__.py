"""Data: sources → tokenizer → store → rows → mixture → batch(step).

Nothing here imports JAX: preparation workers stay small, and batches are plain host arrays.
"""

from bessemer.data.catalog import find_source, open_dataset, open_store, rows_of
from bessemer.data.loader import DataPlan
from bessemer.data.making import make_rows, store_of
from bessemer.data.mixture import DatasetStyle, Sampling, check_mixture, shares_of
from bessemer.data.permutation import key_of, permute
from bessemer.data.prefetch import Prefetcher
from bessemer.data.prepare import StoreInfo, prepare
from bessemer.data.progress import Progress, show_progress
from bessemer.data.rows import Batch, Rows
from bessemer.data.settings import DataSettings, data_root
from bessemer.data.sources import Documents, Files, find_files
from bessemer.data.store import ArrayStore, Store, TokenStore
from bessemer.data.tokenizer import SPECIAL_TOKENS, Tokenizer
from bessemer.data.tokenizer_choice import tokenizer_for, tokenizer_on
from bessemer.data.validation import Validation

__all__ = [
    "SPECIAL_TOKENS",
    "ArrayStore",
    "Batch",
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

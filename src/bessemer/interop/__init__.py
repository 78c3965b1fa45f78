"""Hugging Face models in and out: configurations, weights, tokenizers. Nothing of torch or transformers is needed."""

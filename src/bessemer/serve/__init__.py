"""Trained models in use: a conversation in the terminal, and a local server that speaks OpenAI's protocol."""

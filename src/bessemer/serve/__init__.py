"""Trained models in use: a chat in the terminal, and a server with an OpenAI-compatible API."""

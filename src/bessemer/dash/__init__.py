"""A local web page over a directory of runs: their state, curves side by side, a chat with their models."""

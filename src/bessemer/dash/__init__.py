"""A local web page over a directory of runs: what they do, their curves side by side, a word with their models."""

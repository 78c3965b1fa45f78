"""A local web page over a directory of runs: what they do now, their curves side by side, and a word with their models."""

"""Which rows a step trains on: mixtures and the pure function `batch(step)`."""

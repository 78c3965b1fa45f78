"""From source files to a token store, in parallel and restartable."""

"""What a run saves and restores: checkpoints, frozen weights, teacher caches, mirrors."""

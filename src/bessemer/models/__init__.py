"""Model families: `gpt` (the depth dial's own). Each file registers its family, with its counts and FLOPs."""

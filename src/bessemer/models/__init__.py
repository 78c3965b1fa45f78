"""Model families: `gpt` (the depth dial's own) and `llama` (that of open models).

Each file registers its family, with its counts and FLOPs.
"""

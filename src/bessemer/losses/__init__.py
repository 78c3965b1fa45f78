"""Losses over the vocabulary that never hold the full logits: cross-entropy, KL, distillation, token scores."""

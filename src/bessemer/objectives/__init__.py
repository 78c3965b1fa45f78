"""Objectives: pure functions (apply, params, batch, key, settings) → (weighted loss sum, weight, metric sums)."""

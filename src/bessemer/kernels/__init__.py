"""GPU and TPU kernels with their plain-JAX twins: norms, rotary, attention, feed-forward, loss tiles, float8."""

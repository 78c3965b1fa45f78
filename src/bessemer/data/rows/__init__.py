"""Fixed-size training rows made from a token store: packing, masks, preference pairs."""

"""FP8 casts, scales and copies of weights."""

"""FP8 casts and updates of scales: shapes, the ways to run them, targets."""

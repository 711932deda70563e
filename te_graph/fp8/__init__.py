"""FP8: regions, recipes, layers and their conversion; casts, scales, products, and copies of weights."""

"""Data-parallel training steps of several micro-batches: models, the ways to train them, what they cost, targets."""

"""Layers of a model, found and captured by what one of its steps does."""

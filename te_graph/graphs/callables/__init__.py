"""Graphed modules and functions with gradients."""

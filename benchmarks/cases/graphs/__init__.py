"""Graphed callables: the layers, and the ways to graph them."""

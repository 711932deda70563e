"""Graphed callables and functions."""

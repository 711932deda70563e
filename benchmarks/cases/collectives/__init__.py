"""Collectives: the ways to run them, targets."""

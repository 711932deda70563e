"""Collectives over a PeerGroup."""

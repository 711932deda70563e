"""What a graph takes for granted about Python objects, compared at each call."""

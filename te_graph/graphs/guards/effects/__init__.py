"""What code does besides its results, which a replay would not do again."""

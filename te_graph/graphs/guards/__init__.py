"""What a graph assumes about Python objects, compared before each replay."""

"""From a callable to its graphs."""

"""What the areas share."""

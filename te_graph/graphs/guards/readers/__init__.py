"""What code can reach and read: the walk over objects, and what each kind of object leads to."""

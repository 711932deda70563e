"""Multi-tensor ops: lists of tensors, the ways to run the ops, targets."""

"""Operations over lists of tensors: norms, clipping, gradient accumulation."""

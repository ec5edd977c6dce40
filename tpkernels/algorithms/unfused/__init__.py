"""The plain way: a ``torch.distributed`` collective, then the matmul, or the other way round."""

"""Transfers over torch.distributed between ranks that share no memory, and waits for them."""

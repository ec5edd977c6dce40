"""Between ranks that share no memory: transfers over torch.distributed, and waits for them."""

"""Where tensors lie between a client's bytes and a worker's arrays."""

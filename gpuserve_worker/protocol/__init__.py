"""The messages between a worker and its server, and how tensors are written in them."""

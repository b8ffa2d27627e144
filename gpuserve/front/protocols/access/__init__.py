"""Access control and request processing that HTTP and gRPC share."""

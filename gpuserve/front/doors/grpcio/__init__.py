"""The gRPC door on grpc.aio: the second opinion on our own server."""

"""Protocol layer: the endpoints of the HTTP and gRPC APIs, and access control for them."""

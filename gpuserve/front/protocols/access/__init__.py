"""Access control and request processing that HTTP and gRPC share: endpoints, clients, authorization, body
decoding.
"""

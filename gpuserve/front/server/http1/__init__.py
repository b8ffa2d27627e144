"""HTTP/1.0 and 1.1: bytes in, exchanges out."""

"""HTTP/2 with HPACK: bytes in, exchanges out."""

"""Network layer: listeners, TLS, connections, HTTP/1.1 and HTTP/2. No models and no endpoints."""

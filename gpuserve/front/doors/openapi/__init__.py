"""The OpenAPI description of the HTTP endpoints."""

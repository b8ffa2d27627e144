"""The OpenAPI document of the HTTP endpoints."""

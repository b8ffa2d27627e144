"""Access tokens as headers."""

from __future__ import annotations

from gpuserve.client.client_settings import create_auth_headers, extract_access_token_from_headers

__all__ = ["create_auth_headers", "extract_access_token_from_headers"]

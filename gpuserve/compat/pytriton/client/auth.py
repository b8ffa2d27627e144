"""The access token as a header."""

from __future__ import annotations

from gpuserve.client.settings import create_auth_headers, extract_access_token_from_headers

__all__ = ["create_auth_headers", "extract_access_token_from_headers"]

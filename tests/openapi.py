"""Whether a document is one of OpenAPI 3.1, as another reader has it."""

from __future__ import annotations

from typing import Any


def check_openapi(document: Any) -> None:
    """Fail where the document is none."""
    from openapi_spec_validator import OpenAPIV31SpecValidator  # half a second that few tests need

    OpenAPIV31SpecValidator(document).validate()

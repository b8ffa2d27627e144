"""The entries of ``access_rules`` of ``server``: which tokens open which groups of endpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from gpuserve.access import header_problem, token_problem
from gpuserve.config.fields import EndpointGroup, Entry
from gpuserve.settings import TOKEN_HEADER


def _token(token: str) -> str:
    problem = token_problem(token)
    if problem is not None:
        raise ValueError(problem)
    return token


def _header(header: str) -> str:
    problem = header_problem(header)
    if problem is not None:
        raise ValueError(problem)
    return header


AccessToken = Annotated[str, AfterValidator(_token)]
ControlGroup = Literal["admin", "logging", "model-repository", "shared-memory", "trace"]


class AccessRuleEntry(Entry):
    """A token that opens groups of endpoints."""

    groups: tuple[EndpointGroup, ...] = Field(
        min_length=1, strict=False, description="The groups, which are closed without a token."
    )
    token: AccessToken = Field(repr=False, description="The token.")
    header: Annotated[str, AfterValidator(_header)] = Field(
        default=TOKEN_HEADER, description="The header that carries it where Authorization does not."
    )

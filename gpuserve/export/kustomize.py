"""Kustomize's own files: which objects there are, and what changes them."""

from __future__ import annotations

from typing import Any, Final

_KUSTOMIZATION: Final = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
_COMPONENT: Final = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}


def base(resources: list[str]) -> dict[str, Any]:
    """A kustomization of these files."""
    return {**_KUSTOMIZATION, "resources": resources}


def component(*, resources: list[str] | None = None, patches: list[Any] | None = None) -> dict[str, Any]:
    """A change that goes together with others."""
    made: dict[str, Any] = dict(_COMPONENT)
    if resources:
        made["resources"] = resources
    if patches:
        made["patches"] = patches
    return made


def overlay(name: str) -> dict[str, Any]:
    """The base with one component."""
    return {**_KUSTOMIZATION, "resources": ["../../base"], "components": [f"../../components/{name}"]}

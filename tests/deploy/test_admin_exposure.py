"""The admin API in a cluster: an export takes the setting, and what pods share does not lead there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from exporting import export, exported, written
from manifests import documents

_PLACES = ("ports", "ingress", "egress")


def places(found: Any) -> list[tuple[str, Any]]:
    """Where the objects can be reached, by their kind."""
    return [
        (one["kind"], [one["spec"].get(key) for key in _PLACES])
        for one in found
        if one["kind"] in {"Service", "NetworkPolicy"}
    ]


def test_nothing_more_is_reachable_with_it(tmp_path: Path) -> None:
    without, given = exported(tmp_path), exported(tmp_path, admin_api=True)
    assert places(without)
    assert places(given) == places(without)
    assert [one["kind"] for one in given] == [one["kind"] for one in without]


def test_envoy_does_not_pass_it_on(tmp_path: Path) -> None:
    done = export("envoy", written(tmp_path, admin_api=True))
    assert done.returncode == 0, done.stderr
    (bootstrap,) = documents(done.stdout)
    listeners = bootstrap["static_resources"]["listeners"]
    routes = [
        filter_["typed_config"]["route_config"]["virtual_hosts"][0]["routes"]
        for listener in listeners
        if listener["name"] != "status"  # which is about Envoy itself
        for chain in listener["filter_chains"]
        for filter_ in chain["filters"]
    ]
    assert len(routes) == 2
    for one in routes:
        assert one[0]["match"] == {"prefix": "/v2/admin/"}
        assert one[0]["direct_response"] == {"status": 404, "body": {"inline_string": "Not Found"}}

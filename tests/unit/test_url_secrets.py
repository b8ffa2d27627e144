"""The user and the password in a URL of the configuration are shown nowhere."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from gpuserve.config.effective import effective
from gpuserve.config.load import load_file
from gpuserve.config.problems import ConfigProblems
from gpuserve.config.settings.checks import compare_settings
from gpuserve.config.settings.logs import JsonFormatter, TextFormatter
from gpuserve.config.settings.server import ServerSettings
from gpuserve.config.settings.values import MASK, mask_userinfo

SECRET = "hunter2"
URL = f"http://admin:{SECRET}@collector:4318/v1/traces"
SHOWN = f"http://{MASK}@collector:4318/v1/traces"
MODEL = {"name": "m", "callable": "pkg.mod:f", "kwargs": {"store": URL}}
MODEL |= {name: [{"name": name, "dtype": "FP32", "shape": [1]}] for name in ("inputs", "outputs")}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (URL, SHOWN),
        (f"s3+x://{SECRET}@host a@b.c", f"s3+x://{MASK}@host a@b.c"),
        (f"'http://{SECRET}@a', 'http://{SECRET}@b'", f"'http://{MASK}@a', 'http://{MASK}@b'"),
        ("http://host/path@x http://host?q=a@b", "http://host/path@x http://host?q=a@b"),
        ("name@host", "name@host"),
    ],
)
def test_the_user_and_the_password_are_masked(text: str, shown: str) -> None:
    assert mask_userinfo(text) == shown


def test_the_configuration_and_a_mistake_beside_a_url_are_told_without_them(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"server": {"trace": {"url": URL}}, "models": [MODEL]}))
    printed = json.dumps([one.as_json() for one in effective(load_file(str(path), {}))])
    assert SECRET not in printed
    assert printed.count(SHOWN) == 2
    path.write_text(json.dumps({"server": {"max_connections": URL}, "models": [MODEL]}))
    with pytest.raises(ConfigProblems) as refused:
        load_file(str(path), {"GPUSERVE_SERVER__TRACE__URL": URL.replace("http:", "ftp:")})
    assert SECRET not in str(refused.value)
    assert str(refused.value).count(MASK) >= 2


def test_a_changed_setting_is_told_without_them() -> None:
    change = compare_settings(ServerSettings(), ServerSettings(host=URL))
    (told,) = change.refused
    assert SECRET not in told.text
    assert SHOWN in told.text


@pytest.mark.parametrize("formatter", [JsonFormatter(), TextFormatter()])
def test_the_log_is_written_without_them(formatter: logging.Formatter) -> None:
    try:
        raise OSError(f"no route to {URL}")
    except OSError as error:
        record = logging.LogRecord("gpuserve", logging.ERROR, "", 0, "failed at %s", (URL,), None)
        record.exc_info = (type(error), error, error.__traceback__)
    text = formatter.format(record)
    assert SECRET not in text
    assert text.count(SHOWN) >= 2

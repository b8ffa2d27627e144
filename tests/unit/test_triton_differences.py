"""The comparison with Triton, without Triton: how answers are read and compared, and what is listed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from triton_differences import model_table
from triton_differences.answers import GrpcAnswer, HttpAnswer, NoAnswer, tree
from triton_differences.cases import all_cases
from triton_differences.compare import Difference, Verdict, differences, verdict
from triton_differences.expected import Meant, Rule, meant_by
from triton_differences.meant import MEANT
from triton_differences.model_py import probes
from triton_differences.report import Result, markdown
from triton_differences.steps import Case
from triton_differences.tensors import In, Inference, http_binary, http_json, raw_bytes
from tritonclient.grpc import service_pb2

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"
ENTRY = Meant("topic", "that", "this", "because", (Rule(("http *",), "*.status", "500", "400"),))


@pytest.fixture(scope="module")
def cases() -> tuple[Case, ...]:
    return all_cases()


def test_the_document_has_a_row_for_each_difference_that_is_meant_and_no_other() -> None:
    of_triton, _, _ = DOCUMENT.read_text().partition("## HTTP/2")
    rows = [line for line in of_triton.splitlines() if line.startswith("| ")]
    assert [row for row in rows if row != "| what | Triton | gpuserve | why |"] == [one.row for one in MEANT]


def test_every_pattern_of_the_list_names_a_case_and_no_two_cases_have_the_same_name(
    cases: tuple[Case, ...],
) -> None:
    patterns = [(one.topic, pattern) for one in MEANT for rule in one.rules for pattern in rule.cases]
    names = [*(one.name for one in cases), *(probes.PREFIX + one for one in probes.names())]
    unused = [one for one in patterns if not any(Rule((one[1],)).covers(name, GONE) for name in names)]
    assert unused == []
    assert [name for name, count in Counter(one.name for one in cases).items() if count > 1] == []


def test_every_model_is_written_for_both_servers(tmp_path: Path) -> None:
    model_table.write_triton_repository(tmp_path / "repository")
    model_table.write_gpuserve_config(tmp_path / "config.yaml")
    names = [model.name for model in model_table.MODELS]
    assert sorted(one.name for one in (tmp_path / "repository").iterdir()) == sorted(names)
    config = json.loads((tmp_path / "config.yaml").read_text())
    assert [model["name"] for model in config["models"]] == names
    assert set(config["server"]["load_at_start"]) == set(names) - {"unloaded"}


GONE = Difference("1.status", 500, 400)
SAME: dict[str, Any] = {"status": 200, "body": (("id", "a"), ("data", [1, 2]))}


@pytest.mark.parametrize(
    ("other", "paths"),
    [
        (SAME, []),
        (SAME | {"status": 404}, ["status"]),
        (SAME | {"body": (("data", [1, 2]), ("id", "a"))}, ["body.order"]),
        (SAME | {"body": (("id", "a"), ("data", [1.0, 2]))}, ["body.data[0]"]),
        (SAME | {"body": (("id", "a"), ("data", [1]))}, ["body.data.length"]),
        (SAME | {"body": (("id", "a"),)}, ["body.data"]),
        (SAME | {"headers": {}}, ["headers"]),
    ],
)
def test_where_two_answers_differ(other: dict[str, Any], paths: list[str]) -> None:
    assert [one.path for one in differences(SAME, other)] == paths


def test_an_ignored_field_may_differ_and_words_of_an_error_are_a_kind_of_their_own() -> None:
    assert not list(differences(SAME, SAME | {"status": 404}, frozenset({"status"})))
    assert not list(differences(SAME, {"body": SAME["body"]}, frozenset({"status"})))
    words = Difference("1.text", "no", "no, because")
    found = [verdict(one) for one in ([], [words], [words, GONE])]
    assert found == [Verdict.EQUAL, Verdict.TEXT, Verdict.DIFFERENT]


def test_a_case_is_meant_to_differ_when_every_difference_is_listed() -> None:
    words, other = Difference("1.text", "no", "No"), Difference("1.body", "a", "b")
    assert meant_by("http x", [GONE, words], [ENTRY]) == (ENTRY,)
    assert meant_by("http x", [GONE, other], [ENTRY]) == ()
    assert meant_by("grpc x", [GONE], [ENTRY]) == ()
    assert meant_by("http x", [Difference("1.status", 404, 400)], [ENTRY]) == ()
    assert Rule(("from [1]",)).covers("from [1]", GONE)
    assert not Rule(("from [1]",)).covers("from 1", GONE)


def test_an_answer_of_http() -> None:
    kept = {"content-type": "application/octet-stream"}
    found = tree(HttpAnswer(200, kept | {"inference-header-content-length": "2", "date": "x"}, b"{}\x01"))
    assert found == {"status": 200, "headers": kept, "body": (), "binary": "01"}
    error = tree(HttpAnswer(400, {"content-type": "text/plain"}, b'{"error":"no"}'))
    assert error == {"status": 400, "headers": {}, "body": "error", "text": "no"}
    stream = b'data: {"y":NaN}\n\ndata: {"error":"e"}\n\n'
    events = tree(HttpAnswer(200, {"content-type": "text/event-stream"}, stream))
    assert events["events"] == [{"body": (("y", "NaN"),)}, {"body": "error", "text": "e"}, ""]
    page = b"# HELP nv_x About.\n# TYPE nv_x counter\nnv_x 1\n# TYPE own_y gauge\n"
    assert tree(HttpAnswer(200, {}, page))["metrics"] == {"nv_x": "counter"}


def test_an_answer_of_grpc() -> None:
    path = "/inference.GRPCInferenceService/ModelStreamInfer"
    message = service_pb2.ModelStreamInferResponse(error_message="no")
    message.infer_response.id = "a"
    found = tree(GrpcAnswer(path, "OK", "", (message.SerializeToString(),)))
    assert found["messages"] == [{"infer_response": {"id": "a"}, "body": "error", "text": "no"}]
    assert tree(GrpcAnswer("/other/Method", "OK", "", (b"\x01",)))["messages"] == ["01"]
    assert tree(NoAnswer("the server ended")) == {"no answer": "the server ended"}


def test_tensors_as_they_are_sent() -> None:
    assert raw_bytes("BYTES", ["a", b"\xff"]) == b"\x01\0\0\0a\x01\0\0\0\xff"
    assert raw_bytes("INT8", [-1, 300]) == b"\xff\x2c"
    assert raw_bytes("BF16", [1.0]) == b"\x80\x3f"
    request = Inference("m", [In("x", "INT32", [1], [7])], version="2")
    assert http_json(request).raw.startswith(b"POST /v2/models/m/versions/2/infer HTTP/1.1\r\n")
    assert http_binary(request).raw.endswith(b"}\x07\0\0\0")


def test_the_report_has_what_is_not_listed_first() -> None:
    results = [
        Result("good", Verdict.EQUAL, [], ()),
        Result("bad", Verdict.DIFFERENT, [Difference("1.body", "a|b", "c\nd")], ()),
        Result("meant", Verdict.DIFFERENT, [GONE], (ENTRY,)),
    ]
    lines = markdown(results).splitlines()
    counts = {"equal": 1, "text differs": 0, "different": 2, "of them not listed": 1}
    assert lines[2:6] == [f"| {what} | {count} |" for what, count in counts.items()]
    assert lines.index("| bad | 1.body | a\\|b | c\\nd |") < lines.index("| meant | 1.status | 500 | 400 |")

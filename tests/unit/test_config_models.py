"""The keys of a model and of access: what they come to, and every mistake in them at its place."""

from __future__ import annotations

import json
import re
from pathlib import Path
from textwrap import indent

import numpy as np
import pytest
from case_tables import cases, unmarked
from config_file import load_text, problems_of

from gpuserve.config.schema import json_schema
from gpuserve.config.settings.values import AccessRule
from gpuserve.model.spec import BatchingSpec, ModelSpec, PolicySpec, QueueSpec

SECRET = "hunter2-hunter2"
MODEL = """\
models:
  - name: m
    callable: pkg.mod:f
    inputs: [{name: x, dtype: FP32, shape: [-1, 3]}, {name: y, dtype: bytes, shape: [1], optional: true}]
    outputs: [{name: z, dtype: FP32, shape: [1]}]
"""


def model(tmp_path: Path, keys: str, environ: dict[str, str] | None = None) -> ModelSpec:
    (only,) = load_text(tmp_path, MODEL + keys, environ).models
    return only


def test_a_mistake_under_the_name_of_triton_is_reported_by_this_name(tmp_path: Path) -> None:
    keys = """\
    max_batch_size: 8
    batching: {max_queue_delay_microseconds: -5, "preferred_batch_size": [9]}
    queue: {default_queue_policy: {timeout_action: NO, foo: 1}}
"""
    told = [one.splitlines()[0].partition(": ")[2] for one in problems_of(tmp_path, MODEL + keys)]
    assert [re.split(": |; known", one)[0] for one in told] == [
        "models[0].batching.max_queue_delay_microseconds",
        "expected a preferred batch size of at most max_batch_size, which is 8, given 9",
        "models[0].queue.default_queue_policy.timeout_action",
        "unknown key 'foo' in models[0].queue.default_queue_policy",
    ]


def test_every_key_of_a_model(tmp_path: Path) -> None:
    keys = """\
    max_batch_size: 8
    decoupled: true
    concurrency: 5
    on_unrecoverable: restart_worker
    batching: {merge: false, preserve_ordering: true}
    queue:
      priority_levels: 1
      default_priority: 1
      policy: {timeout_action: reject, default_timeout_us: 7, allow_timeout_override: true, max_requests: 3}
"""
    made = model(tmp_path, keys)
    assert (made.decoupled, made.retry_on_worker_death, made.concurrency) == (True, False, 5)
    assert made.on_unrecoverable == "restart_worker"
    assert made.batching == BatchingSpec(merge=False, preserve_ordering=True)
    policy = PolicySpec("reject", 7, True, 3)
    assert made.queue == QueueSpec(priority_levels=1, default_priority=1, policy=policy)
    default = model(tmp_path, "")
    assert default == ModelSpec("m", made.inputs, made.outputs, 0, made.instances)


@pytest.mark.parametrize("level", ["2", '"2"'])
def test_policies_by_level(tmp_path: Path, level: str) -> None:
    policies = f"{{12: {{}}, {level}: {{max_requests: 9}}}}"
    keys = f"    queue: {{priority_levels: 12, default_priority: 1, policies: {policies}}}"
    queue = model(tmp_path, keys).queue
    assert queue.policies == ((2, PolicySpec(max_requests=9)), (12, PolicySpec()))


def test_a_policy_from_the_environment(tmp_path: Path) -> None:
    environ = {
        "GPUSERVE_MODELS__M__QUEUE__PRIORITY_LEVELS": "2",
        "GPUSERVE_MODELS__M__QUEUE__DEFAULT_PRIORITY": "2",
        "GPUSERVE_MODELS__M__QUEUE__POLICIES__1__TIMEOUT_ACTION": "delay",
    }
    assert model(tmp_path, "", environ).queue.policies == ((1, PolicySpec("delay")),)


def test_a_model_may_have_no_tensors(tmp_path: Path) -> None:
    text = "models:\n  - {name: m, callable: pkg.mod:f, inputs: [], outputs: []}\n"
    (made,) = load_text(tmp_path, text).models
    assert (made.inputs, made.outputs) == ((), ())


def test_warmups(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, 3), np.float32))
    keys = """\
    max_batch_size: 4
    warmup:
      - {name: a, batch_size: 4, count: 2, inputs: {x: {shape: [2, 3], values: zero}}}
      - name: b
        inputs:
          y: {dtype: bytes}
          x: {shape: [2, 3], file: x.npy}
"""
    zeros = ("x", "FP32", (2, 3), "zero", "")
    from_file = ("x", "FP32", (2, 3), "file", str(tmp_path / "x.npy"))
    assert model(tmp_path, keys).warmup == (
        ("a", 4, 2, (zeros,)),
        ("b", 1, 1, (from_file, ("y", "BYTES", (1,), "random", ""))),
    )


@pytest.mark.parametrize(
    ("keys", "text"),
    cases("""\
decoupled: true
response_cache: «true»
-> response_cache does not go with decoupled
decoupled: true
retry_on_worker_death: «true»
-> retry_on_worker_death does not go with decoupled: some responses may have been sent already
concurrency: «0»
-> concurrency: expected an integer from 1 to 4096, given the number 0
on_unrecoverable: «exit»
-> expected one of 'shutdown' or 'restart_worker', given the string 'exit'
decoupled: «1»
-> decoupled: expected true or false, given the number 1
max_batch_size: 4
batching: {merge: false, max_queue_delay_us: «5»}
-> max_queue_delay_us has no effect without merge: every request is its own batch
queue: {priority_levels: «3»}
-> The `default_priority` must be between 1 and 3. Got 0.
queue: {priority_levels: 3, default_priority: «4»}
-> The `default_priority` must be between 1 and 3. Got 4.
queue: {default_priority: «1»}
-> Provide the `priority_levels` for a `default_priority`, which is 1.
queue: {policies: «{1: {}}»}
-> Provide the `priority_levels` if you want to define `policies` for Dynamic Batching.
queue: {priority_levels: 2, default_priority: 1, policies: {3: «{}»}}
-> Invalid `priority`=3 provided. The value must be between 1 and 2.
queue: {priority_levels: 2, default_priority: 1, policies: {«low»: {}}}
-> expected a level of priority, an integer of at least 1, given 'low'
queue: {policy: {timeout_action: «drop»}}
-> queue.policy.timeout_action: expected one of 'reject' or 'delay', given the string 'drop'
queue: {policy: {«max_request»: 5}}
-> unknown key 'max_request' in models[0].queue.policy; did you mean 'max_requests'?
queue: {priority_levels: 1, default_priority: 1, policies: {1: {«max»: 5}}}
-> unknown key 'max' in models[0].queue.policies.1
batching: {preserve_ordering: true}
queue: {priority_levels: «2», default_priority: 1}
-> preserve_ordering goes with one level of priority, given 2
batching: {preserve_ordering: true}
queue: {policy: {timeout_action: «delay», default_timeout_us: 5}}
-> preserve_ordering does not go with delay; expected 'reject'
max_batch_size: 4
warmup: [{name: w, batch_size: «5», inputs: {x: {shape: [2, 3]}}}]
-> warm-up 'w': batch_size must be at most max_batch_size (4), got 5
warmup: [{name: w, inputs: «{q: {}, x: {shape: [2, 3]}}»}]
-> warm-up 'w': the model has no input 'q'; its inputs are x, y
warmup: [«{name: w}»]
-> warm-up 'w': input 'x' has no shape, and the model declares [-1, 3]
warmup: [{name: w, inputs: {x: «{shape: [2, 4]}»}}]
-> warm-up 'w': input 'x' has the shape [2, 4], but the model declares [-1, 3]
warmup: [{name: w, inputs: {x: «{dtype: int8, shape: [2, 3]}»}}]
-> warm-up 'w': input 'x' is INT8, but the model declares it as FP32
warmup: [{name: w, inputs: {x: {file: «gone.npy», shape: [2, 3]}}}]
-> warm-up 'w': input 'x': there is no file gone.npy
"""),
)
def test_mistakes(tmp_path: Path, keys: str, text: str) -> None:
    whole, line, marked = unmarked(f"{MODEL}{indent(keys, '    ')}\n")
    (problem,) = problems_of(tmp_path, whole)
    head, source, carets = problem.splitlines()
    assert head.startswith(f"config.yaml:{line}:")
    assert text in head
    start = carets.index("^")
    assert source[start : start + carets.count("^")] == marked


# ---- who may ask for what -----------------------------------------------------------------------


def test_restricted_endpoints(tmp_path: Path) -> None:
    text = f"server: {{restricted_endpoints: [trace, logging], access_token: {SECRET}}}\n{MODEL}"
    loaded = load_text(tmp_path, text)
    assert loaded.settings.restricted_endpoints == ("trace", "logging")
    assert loaded.settings.access_token == SECRET
    assert SECRET not in f"{loaded.settings!r}{loaded.entries!r}"


def test_restricted_endpoints_need_a_token_from_anywhere(tmp_path: Path) -> None:
    text = f"server:\n  restricted_endpoints: [trace]\n{MODEL}"
    (problem,) = problems_of(tmp_path, text)
    assert problem.startswith("config.yaml:2:25: restricted_endpoints need an access_token")
    environ = {"GPUSERVE_SERVER__ACCESS_TOKEN": "12345"}
    assert load_text(tmp_path, text, environ).settings.access_token == "12345"


def test_access_rules(tmp_path: Path) -> None:
    rule = f"{{groups: [trace, health], token: {SECRET}, header: My-Key}}"
    loaded = load_text(tmp_path, f"server:\n  access_rules: [{rule}]\n  remote_control: [logging]\n{MODEL}")
    assert loaded.settings.access_rules == (AccessRule(("trace", "health"), SECRET, "My-Key"),)
    assert loaded.settings.remote_control == ("logging",)
    assert SECRET not in f"{loaded.settings!r}{loaded.entries!r}"
    environ = {"GPUSERVE_SERVER__ACCESS_RULES": f"[{{groups: [trace], token: {SECRET}}}]"}
    assert load_text(tmp_path, MODEL, environ).settings.access_rules == (AccessRule(("trace",), SECRET),)


@pytest.mark.parametrize(
    ("server", "text"),
    [
        (
            "access_token: a, restricted_endpoints: [tracing]",
            "restricted_endpoints[0]: expected one of 'admin', 'dashboard', 'health'",
        ),
        ("remote_control: [inference]", "remote_control[0]: expected one of 'admin', 'logging'"),
        ("access_rules: [{token: a}]", "missing key 'groups' in server.access_rules[0]"),
        ("access_rules: [{groups: [trace]}]", "missing key 'token' in server.access_rules[0]"),
        ("access_rules: [{groups: [], token: a}]", "access_rules[0].groups: expected at least one entry"),
        ("access_rules: [{groups: [trace], token: a, header: b c}]", "expected a header's name of letters"),
        ("tls_certfile: c.pem", "tls_certfile and tls_keyfile go together; tls_keyfile is missing"),
        ("tls_client_ca: c.pem", "tls_client_ca needs tls_certfile and tls_keyfile"),
        ("tls_ports: [https]", "tls_ports[0]: expected one of 'http', 'grpc' or 'metrics'"),
        ("http_header_forward_pattern: '('", "expected a regular expression, given '('"),
        ("grpc_header_forward_pattern: '*'", "expected a regular expression, given '*'"),
    ],
)
def test_mistakes_of_access(tmp_path: Path, server: str, text: str) -> None:
    (problem,) = problems_of(tmp_path, f"server: {{{server}}}\n{MODEL}")
    assert text in problem


@pytest.mark.parametrize(
    "server",
    [
        "access_token: 5551234",
        'access_token: ""',
        f'access_token: " {SECRET}"',
        f"access_token: [{SECRET}]",
        f"acess_token: {SECRET}",
        f"access-token: '{SECRET}'",
        f"access_token: {SECRET}, http_port: {SECRET[:3]}",
        f'"access_token": "{SECRET}", http_port: -5',
        f"access_rules: {SECRET}",
        f"access_rules: [{SECRET}]",
        f"access_rules: [[trace, {SECRET}]]",
        f"access_rules: [{{groups: trace, token: {SECRET}}}]",
        f"access_rules: [{{groups: [{SECRET}], token: {SECRET}}}]",
        f"access_rules: [{{groups: [trace], tokn: {SECRET}}}]",
        f"access_rules: [{{groups: [trace], token: '{SECRET} '}}]",
        f"access_rules: [{{groups: [trace], token: a, header: ' {SECRET}'}}]",
        f"acces_rules: [{{groups: [trace], token: {SECRET}}}]",
    ],
)
@pytest.mark.parametrize("flow", [True, False])
def test_no_message_shows_the_token(tmp_path: Path, server: str, flow: bool) -> None:
    mapping = f"server: {{{server}}}\n" if flow else f"server:\n  {server.replace(', ', chr(10) + '  ')}\n"
    said = "\n".join(problems_of(tmp_path, mapping + MODEL))
    assert said
    assert SECRET not in said
    assert "5551234" not in said


def test_no_message_shows_the_token_of_the_environment_or_of_a_file_that_is_no_yaml(tmp_path: Path) -> None:
    for text, environ, told in (
        (f"server: {{access_token: {SECRET}, ]\n", {}, "not valid YAML"),
        (
            MODEL,
            {"GPUSERVE_SERVER__ACCESS_TOKEN": f" {SECRET} "},
            "GPUSERVE_SERVER__ACCESS_TOKEN: expected printable ASCII",
        ),
    ):
        said = "\n".join(problems_of(tmp_path, text, environ))
        assert told in said
        assert SECRET not in said


def test_the_new_keys_are_in_the_json_schema() -> None:
    text = json.dumps(json_schema())
    assert all(f'"{key}"' in text for key in ("decoupled", "warmup", "policies", "timeout_action", "values"))

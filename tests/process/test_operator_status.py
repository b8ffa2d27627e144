"""``gpuserve status``: what a running server says of itself, in every state, and which server is asked."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bound import FLOATS_IN_AND_OUT, free_server
from commands import gpuserve, row, status
from operated import InBackground, OperatedServer, Orders, config, model
from processes import finished, wait_until

from gpuserve import Server, __version__
from gpuserve.core.errors import ControlError
from gpuserve.supervisor.control import operator_client


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    """A server of the model "m" with two instances, and of "n", which is not loaded."""
    folder = tmp_path_factory.mktemp("status")
    orders = Orders(folder / "orders")
    models = model("m", orders, instances=[{"device": "cpu", "count": 2}]), model("n", orders)
    settings = {"host": "127.0.0.1", "model_control": "explicit", "load_at_start": ["m"]}
    with OperatedServer(config(folder, *models, **settings)) as server:
        yield server.wait_ready()


def double(requests: Any) -> Any:
    return [{"OUTPUT_1": 2 * one["INPUT_1"]} for one in requests]


# ---- what it says ---------------------------------------------------------------------------


def test_a_server_that_serves(shared: OperatedServer) -> None:
    found = status(shared.addresses["HTTP"])
    server = found["server"]
    assert (server["name"], server["version"], server["pid"]) == ("gpuserve", __version__, shared.pid)
    assert (server["state"], server["service"], server["ready"]) == ("SERVING", "IN_SERVICE", True)
    assert server["front"] == {"pid": shared.front, "restarts": 0, "answers": True}
    assert Path(f"/proc/{shared.front}/comm").read_text() == "gs:front\n"
    assert server["addresses"]["http"] == f"http://{shared.addresses['HTTP']}"
    assert Path(server["config"]).is_absolute()
    assert server["config"].endswith("config.yaml")
    assert 0.0 < server["uptime_s"] < 600.0
    m, n = found["models"]
    assert (m["name"], m["version"], m["state"], m["reason"], m["source"]) == ("m", 1, "READY", "", "config")
    assert [(one["device"], one["state"], one["restarts"]) for one in m["instances"]] == [
        ("cpu", "READY", 0)
    ] * 2
    assert sorted(one["pid"] for one in m["instances"]) == shared.workers
    assert all(one["memory_nbytes"] > 1 << 20 for one in m["instances"])
    assert (m["queued"], m["in_flight"], m["slots"], m["saturation"]) == (0, 0, 2, 0.0)
    assert (n["name"], n["state"], n["reason"], n["instances"]) == ("n", "UNAVAILABLE", "not loaded", ())


@pytest.mark.parametrize("role", ["HTTP", "gRPC", "metrics"])
def test_each_port_leads_to_it(shared: OperatedServer, role: str) -> None:
    found = gpuserve("status", "--json", server=shared, role=role)
    assert (found.status, found.stderr) == (0, "")
    assert found.document["server"]["pid"] == shared.pid


def test_it_is_shown_to_people(shared: OperatedServer) -> None:
    found = gpuserve("status", server=shared)
    assert found.status == 0
    lines = found.stdout.splitlines()
    assert lines[0].startswith("gpuserve: SERVING, ready, up ")
    assert any(line.split()[:3] == ["m", "1", "READY"] for line in lines)
    assert any(line.startswith("n ") and "UNAVAILABLE (not loaded)" in line for line in lines)
    assert sum(line.startswith("m ") and " cpu " in line for line in lines) == 2


def test_what_waits_and_runs_is_counted(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(
        config(tmp_path, model("m", orders, max_batch_size=1), host="127.0.0.1")
    ).until_killed() as server:
        at = server.addresses["HTTP"]
        orders.shut()
        asked = [InBackground(server.infer, "m", float(n)) for n in range(3)]
        wait_until(lambda: row(at, "m")["in_flight"] + row(at, "m")["queued"] == 3, "they are there")
        found = row(at, "m")
        assert found["saturation"] == (found["in_flight"] + found["queued"]) / found["slots"]
        orders.open()
        assert all(one.result().status == 200 for one in asked)
        assert (row(at, "m")["queued"], row(at, "m")["in_flight"]) == (0, 0)


def test_a_worker_that_died_is_told(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders), host="127.0.0.1")).until_killed() as server:
        (dead,) = server.workers
        os.kill(dead, signal.SIGKILL)
        at = server.addresses["HTTP"]
        wait_until(lambda: row(at, "m")["instances"][0]["restarts"] == 1, "the restart is counted")
        wait_until(lambda: row(at, "m")["state"] == "READY", "it is back")
        assert server.infer("m", 1.0).output("pid") == server.workers != [dead]


def test_a_server_whose_models_load(tmp_path: Path, orders: Orders) -> None:
    orders.shut()
    served = config(tmp_path, model("m", orders, "load_slowly"), host="127.0.0.1")
    with OperatedServer(served) as server:
        wait_until((orders.directory / "loading").exists, "it loads")
        found = status_of_process(server.pid)
        assert (found["server"]["state"], found["server"]["ready"]) == ("STARTING", False)
        assert (found["models"][0]["state"], found["models"][0]["source"]) == ("LOADING", "config")
        address = next(iter(found["server"]["addresses"].values())).removeprefix("http://")
        refused = operator_client.ask(address, "scale", {"counts": {"m": 2}}, lambda _: None)
        assert (refused.code, refused.text) == (
            "UNAVAILABLE",
            "the server is starting, and takes no command but status",
        )
        orders.open()
        server.wait_ready()
        assert status(server.addresses["HTTP"])["server"]["state"] == "SERVING"


def status_of_process(pid: int) -> dict[str, Any]:
    """The status of a server of which only the process is known: its sockets are in its own table."""
    (found,) = [names for (_, process), names in operator_client.running().items() if process == pid]
    return status(str(found[0]))


def test_a_server_that_is_told_to_end(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(
        config(tmp_path, model("m", orders), host="127.0.0.1", lame_duck_s=60)
    ).until_ended() as server:
        server.process.send_signal(signal.SIGTERM)
        at = server.addresses["HTTP"]
        wait_until(lambda: status(at)["server"]["state"] == "DRAINING", "it drains")
        assert not status(at)["server"]["ready"]
        refused = operator_client.ask(at, "drain", {}, lambda _: None)
        assert (refused.code, refused.text) == (
            "UNAVAILABLE",
            "the server is stopping, and takes no command but status",
        )


def test_a_front_that_hangs_is_not_waited_for(tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders), host="127.0.0.1")).until_killed() as server:
        os.kill(server.front, signal.SIGSTOP)
        started = time.monotonic()
        found = status(server.addresses["HTTP"])
        assert time.monotonic() - started < 10.0
        assert found["server"]["front"] == {"pid": server.front, "restarts": 0, "answers": False}
        assert {found["models"][0][key] for key in ("queued", "in_flight", "slots", "saturation")} == {None}
        assert found["server"]["ready"] is False
        assert (found["models"][0]["state"], len(found["models"][0]["instances"])) == ("READY", 1)
        os.kill(server.front, signal.SIGKILL)
        wait_until(lambda: status(server.addresses["HTTP"])["server"]["front"]["answers"], "another one")
        assert status(server.addresses["HTTP"])["server"]["front"]["restarts"] == 1


@pytest.mark.thorough
def test_a_server_of_a_program_and_one_that_is_attached_to_it() -> None:
    with free_server(attachable=True) as server:
        server.bind("own", double, **FLOATS_IN_AND_OUT)
        server.run()
        at = server.addresses["http"].removeprefix("http://")
        with Server.attach(at) as attached:
            attached.bind("theirs", double, **FLOATS_IN_AND_OUT)
            own, theirs = row(at, "own"), row(at, "theirs")
            assert own["source"] == theirs["source"] == f"program {os.getpid()}"
            assert (theirs["state"], theirs["instances"][0]["state"]) == ("READY", "READY")
            assert theirs["instances"][0]["pid"] is not None
            for verb, does in (("load", "loads"), ("unload", "unloads"), ("reload", "loads")):
                refused = operator_client.ask(at, verb, {"model": "theirs"}, lambda _: None)
                assert refused.code == "INVALID_ARGUMENT"
                assert f"only that program {does} its models" in refused.text
        assert status(at)["server"]["config"] == ""


@pytest.mark.thorough
def test_it_works_where_programs_cannot_attach() -> None:
    with free_server(attachable=False) as server:
        server.bind("m", double, **FLOATS_IN_AND_OUT)
        server.run()
        assert row(server.addresses["grpc"], "m")["state"] == "READY"
        server.stop()
        server.run()  # the names are free again
        assert row(server.addresses["grpc"], "m")["state"] == "READY"


# ---- which server ---------------------------------------------------------------------------


def test_no_server_at_that_port(shared: OperatedServer) -> None:
    with pytest.raises(ControlError, match="no server of this user runs at localhost:1 on this machine"):
        status("localhost:1")
    found = gpuserve("drain", "--server", "localhost:1")
    assert (found.status, found.stdout) == (1, "")
    assert f"(process {shared.pid})" in found.stderr
    found = gpuserve("status", "--json", "--server", "localhost:1")
    assert (found.status, found.document["code"]) == (1, "UNAVAILABLE")
    assert found.document["error"].startswith("no server of this user runs at localhost:1")


def test_another_machine(shared: OperatedServer) -> None:
    with pytest.raises(ControlError, match=r"'192\.0\.2\.1' is another machine"):
        status("192.0.2.1:8000")


@pytest.mark.parametrize("server", ["", "localhost:port", "ftp://localhost:1", "localhost:1/v2"])
def test_no_address(server: str) -> None:
    with pytest.raises(ControlError, match="--server: expected localhost:8000"):
        status(server)


def test_no_address_is_a_wrong_command_line() -> None:
    found = gpuserve("status", "--server", "localhost:port")
    assert (found.status, found.stdout) == (2, "")
    assert "expected localhost:8000" in found.stderr


def test_several_servers_are_listed(shared: OperatedServer, tmp_path: Path, orders: Orders) -> None:
    with OperatedServer(config(tmp_path, model("m", orders), host="127.0.0.1")).until_killed() as other:
        found = gpuserve("status")
        assert (found.status, found.stdout) == (1, "")
        assert found.stderr.startswith("several servers run here, choose one by --server: ")
        assert f"(process {shared.pid})" in found.stderr
        assert f"(process {other.pid})" in found.stderr


@pytest.mark.thorough
def test_one_port_on_two_addresses_is_two_servers(tmp_path: Path, orders: Orders) -> None:
    addresses = "127.0.0.31", "127.0.0.32"
    first = tmp_path / "first"
    first.mkdir()
    with OperatedServer(config(first, model("m", orders), host=addresses[0])) as one:
        port = one.wait_ready().addresses["HTTP"].rpartition(":")[2]
        second = tmp_path / "second"
        second.mkdir()
        flags = ("--http-port", port, "--grpc-port", "0", "--metrics-port", "0")
        with OperatedServer(
            config(second, model("m", orders), host=addresses[1]), *flags
        ).until_killed() as other:
            pids = [status(f"{address}:{port}")["server"]["pid"] for address in addresses]
            assert pids == [one.pid, other.pid]


def test_a_command_starts_without_what_only_a_server_needs() -> None:
    program = "import sys\nsys.argv = ['gpuserve', 'status', '--server', 'localhost:1']\n"
    program += "from gpuserve.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n"
    program += "    import json\n    print(json.dumps([end.code, sorted(sys.modules)]))"
    done = finished([sys.executable, "-c", program], check=True)
    code, modules = json.loads(done.stdout)
    assert code == 1
    assert not {one.partition(".")[0] for one in modules} & {"numpy", "grpc", "asyncio", "rich", "yaml"}
    assert "gpuserve.config" not in modules

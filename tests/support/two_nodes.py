"""Starts a Ray cluster of two nodes on this machine, runs commands next to it, and ends it.

    python two_nodes.py COMMANDS.json RESULTS.json

COMMANDS is a list of {"words": [...], "env": {...}, "limit": seconds}; "{dashboard}" and "{gcs}" in values of env
become the cluster's addresses. RESULTS is a list of {"returncode", "output"}. The caller limits the time and
collects what is left; see tests/support/programs.py.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

START_SECONDS = 300.0
RAY = str(Path(sys.executable).parent / "ray")
# Of the programs that run the cluster; what jobs and their workers have must come from the launcher.
NOT_INHERITED = ("VERL_", "OFFPOLICY_", "PYTHONPATH", "RAY_ADDRESS")


def free_ports(count: int) -> list[int]:
    """Find different ports on which nothing listens."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def start(folder: Path, nodes: list[subprocess.Popen[bytes]]) -> dict[str, str]:
    """Start a head and a second node, each in the foreground of its own process, add them to ``nodes``, and return
    their addresses.
    """
    gcs, dashboard, client, *others = free_ports(9)
    addresses = {"gcs": f"127.0.0.1:{gcs}", "dashboard": f"http://127.0.0.1:{dashboard}"}
    bare = {key: value for key, value in os.environ.items() if not key.startswith(NOT_INHERITED)}
    common = ["--num-cpus=2", "--num-gpus=0", "--object-store-memory=100000000", "--block", "--disable-usage-stats"]
    common += ["--min-worker-port=0", "--max-worker-port=0"]  # any free one: both nodes share the machine's ports
    head = ["--head", f"--port={gcs}", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}"]
    head += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    head.append(f"--ray-client-server-port={client}")
    second = [f"--address=127.0.0.1:{gcs}", "--node-ip-address=127.0.0.1"]
    for number, own in enumerate((head, second)):
        agent, grpc, metrics = others[3 * number : 3 * number + 3]
        ports = [f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={grpc}"]
        ports.append(f"--metrics-export-port={metrics}")
        # What a node prints tells nothing that a failed job does not, and would drown the commands' output.
        log = (folder / f"node{number}.log").open("wb")
        words = [RAY, "start", *own, *common, *ports]
        nodes.append(subprocess.Popen(words, env=bare, stdout=log, stderr=subprocess.STDOUT))
        wait_for_nodes(addresses["dashboard"], number + 1, nodes, folder)
    return addresses


def wait_for_nodes(dashboard: str, count: int, nodes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until the server that accepts jobs sees this many live nodes."""
    from ray.util.state import list_nodes

    deadline, said = time.monotonic() + START_SECONDS, ""
    while time.monotonic() < deadline and all(node.poll() is None for node in nodes):
        try:
            if len(list_nodes(address=dashboard, filters=[("state", "=", "ALIVE")])) >= count:
                return
        except Exception as error:  # not up yet, which Ray says in several ways
            said = str(error)
        time.sleep(0.5)
    logs = "\n".join(log.read_text(errors="replace")[-1500:] for log in folder.glob("node*.log"))
    raise SystemExit(f"the cluster did not start: {said}\n{logs}")


def run(command: dict[str, Any], addresses: dict[str, str]) -> dict[str, Any]:
    """Run one command with a time limit."""
    variables = {key: value.format(**addresses) for key, value in command["env"].items()}
    bare = {key: value for key, value in os.environ.items() if not key.startswith(NOT_INHERITED)}
    done = subprocess.run(
        command["words"],
        env={**bare, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=command["limit"],
        check=False,
    )
    return {"returncode": done.returncode, "output": done.stdout}


def main(commands: Path, results: Path) -> None:
    # A secret of this cluster's own: without one, newer releases of Ray take the user's where there is one.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # A socket's path must be shorter than 108 characters.
    folder = Path(tempfile.mkdtemp(prefix="two", dir="/tmp"))
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        addresses = start(folder, nodes)
        done = []
        for command in json.loads(commands.read_text()):
            done.append(run(command, addresses))
            results.write_text(json.dumps(done))
    finally:
        for node in reversed(nodes):
            node.send_signal(signal.SIGTERM)
        for node in nodes:
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                node.kill()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Connects to a Ray cluster that somebody else has started, and tells what it lacks.

Ray only places and watches processes here: actors and placement groups. What passes through it are keys of
units, their answers and lines of logs; everything else is in the store.

Invariants: nothing is started on a cluster before its address, version and token are known to fit, and Ray's
telemetry is off in every process that this project starts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from specs.errors import StageError
from specs.profiles import RayProfile

CLIENT = "ray://"
CONNECT_SECONDS = 10.0
PATIENCE_SECONDS = 30.0  # until it is said what is waited for
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # on by default where nobody can be asked
    "RAY_SCHEDULER_EVENTS": "0",  # tips of the autoscaler in the middle of the stage's output
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
NAMESPACE = "apertus"
ABOUT_ACTOR = re.compile(r"\w+: \S+$")  # a line of Ray's errors
EMPTY = re.compile(r"The actor died unexpectedly before finishing this task\. |Node Id: \w+ |\(?ID: \w+\)? ?")
ADVICE = re.compile(r"Some common causes|The task may or may not|[Tt]o see more information|Refer to ")


class ClusterLost(RuntimeError):
    """This process has lost the cluster. Another attempt may find it again."""


@contextlib.contextmanager
def connection(settings: RayProfile, *, log_to_driver: bool = True) -> Iterator[Any]:
    """The module `ray`, connected to the cluster inside the block. What the process has on the cluster ends
    with it. StageError as in `connect`; ClusterLost when the cluster is lost meanwhile.

    Args:
        log_to_driver: what actors print is printed here, too.
    """
    ray = connect(settings, log_to_driver=log_to_driver)
    try:
        yield ray
    except ConnectionError as error:  # of Ray's client
        raise ClusterLost(f"the Ray cluster does not answer any more: {_reason(error)}") from error
    finally:
        ray.shutdown()


def connect(settings: RayProfile, *, log_to_driver: bool = True) -> Any:
    """Connects this process to the cluster, and returns the module `ray`; called in the main thread.
    StageError, with the fix, where that is impossible."""
    address = settings.address or os.environ.get("RAY_ADDRESS")
    if not address:
        raise StageError(
            "no Ray cluster is named. Fix: set ray: {address: HOST:6379} in the profile, or RAY_ADDRESS"
        )
    os.environ |= QUIET
    try:
        import ray
    except ImportError as error:
        raise StageError("Ray is not installed here. Fix: pip install 'apertus[ray]'") from error
    _check_answers(address)
    if not address.startswith(CLIENT):
        _check_node_here(address)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, namespace=NAMESPACE, logging_level=logging.WARNING, log_to_driver=log_to_driver)
    except Exception as error:  # of many kinds: versions, tokens, a cluster that ends meanwhile
        raise StageError(f"Ray at {address} refuses this process: {_reason(error)}") from error
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray's own would end this process at once
    if os.environ.get("RAY_AUTH_MODE") != "token":
        print("note: Ray is used without a token: whoever reaches its ports can run code", flush=True)
    return ray


def _check_answers(address: str) -> None:
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
    if not host or not port.isdigit():
        raise StageError(
            f"'{address}' is no address of a Ray cluster. Fix: write HOST:6379 of its head on one of its"
            " nodes, or ray://HOST:10001 anywhere else"
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise StageError(
            f"no Ray cluster answers at {address}: {error}. Fix: start it (docs/operations.md), or correct"
            " ray.address in the profile"
        ) from error


def _check_node_here(address: str) -> None:
    """StageError on a machine without a node of the cluster, where Ray would abort the process."""
    host, _, port = address.rpartition(":")
    names = (host, *_addresses(host), *(_addresses(socket.gethostname()) if _is_loopback(host) else ()))
    heads = {f"--gcs-address={name}:{port}" for name in names}
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if words[0].endswith("raylet") and heads & set(words):
            return
    raise StageError(
        f"this machine has no node of the Ray cluster at {address}. Fix: run `ray start --address={address}"
        f" --num-cpus=0` here, or use the address ray://{host}:10001"
    )


def _addresses(host: str) -> list[str]:
    try:
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None)]
    except OSError:
        return []


def _is_loopback(host: str) -> bool:
    return any(ip_address(address).is_loopback for address in _addresses(host))


def _reason(error: Exception) -> str:
    """What went wrong, in the first line of Ray's text, and how to mend it."""
    text = str(error)
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if "Version mismatch" in text or "version" in first.lower():
        return f"{' '.join(text.split())}. Fix: install the same Ray and the same Python on both"
    if "auth" in text.lower() or "token" in text.lower():
        return f"{first}. Fix: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file of its token"
    return first


def own_node(ray: Any) -> str:
    """Ray's id of the node of this process: the head's for a client."""
    return str(ray.get_runtime_context().get_node_id())


def check_node(ray: Any, name: str) -> None:
    """ClusterLost if a node has ended. A process whose own node has ended waits for ever."""
    if not any(node["NodeID"] == name and node["Alive"] for node in ray.nodes()):
        raise ClusterLost("the node of the Ray cluster through which this stage was run has ended")


def nodes_in_words(ray: Any) -> str:
    """What each living node of the cluster has."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    shown = [f"{node['NodeManagerAddress']} has {in_words(node['Resources'])}" for node in nodes]
    return "; ".join(shown) or "the cluster has no node"


def in_words(resources: Mapping[str, float]) -> str:
    """CPUs, GPUs and memory, as people write them."""
    words = [f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU")]
    return ", ".join([*words, f"{resources.get('memory', 0) / 2**30:.1f} GiB"])


def lost_in_words(error: Exception) -> str:
    """Ray's explanation of a lost actor, without its ids and its advice."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line and not ABOUT_ACTOR.match(line))
    where = next((f" on {line.removeprefix('ip: ')}" for line in lines if line.startswith("ip: ")), "")
    return f"{type(error).__name__}{where}: {EMPTY.sub('', ADVICE.split(text)[0]).strip()}"

"""Connects to a Ray cluster that somebody else has started, and tells what it lacks.

Ray only places and watches processes here: actors and placement groups. What passes through it are keys of
units, their answers and lines of logs; everything else is in the store.

Invariants: nothing is started on a cluster before its address, version and token are known to fit, and Ray's
telemetry is off in every process that this project starts.
"""

import contextlib
import functools
import logging
import os
import re
import signal
import socket
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from specs.errors import StageError, counted
from specs.launch import Launch, Workers
from specs.profiles import Profile, RayProfile

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
QUESTION = "/ray.rpc.NodeInfoGcsService/CheckAlive"  # of a head, for any process
CLIENT_QUESTION = "/ray.rpc.RayletDriver/ClusterInfo"
TOKEN = "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file of the cluster's token"
FORK_FAILED = "Starting Ray client server failed"  # seen once, when the head was answering others meanwhile
LONGEST = 300  # characters of an error of Ray
HEAD = "--gcs-address="  # an argument of Ray's process on a node
ABOUT_ACTOR = re.compile(r"\w+: \S+$")  # a line of Ray's errors
EMPTY = re.compile(r"The actor died unexpectedly before finishing this task\. |Node Id: \w+ |, ID: \w+")
ADVICE = re.compile(r"Some common causes|The task may or may not|OOM kill reason|Refer to ")


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
    address = address_of(settings)
    os.environ |= QUIET
    try:
        import ray
    except ImportError as error:
        raise StageError("Ray is not installed here. Fix: pip install 'apertus[ray]'") from error
    _check_answers(address)
    if not address.startswith(CLIENT):
        _check_node_here(address)
    terminated = signal.getsignal(signal.SIGTERM)  # Ray's own would end this process at once
    try:
        _check_token(address)
        _begin(ray, address, log_to_driver)
    except StageError:
        raise
    except Exception as error:  # of many kinds: versions, tokens, a cluster that ends meanwhile
        raise StageError(f"Ray at {address} refuses this process: {_reason(error)}") from error
    finally:
        signal.signal(signal.SIGTERM, terminated)
    return ray


def _begin(ray: Any, address: str, log_to_driver: bool) -> None:
    begin = functools.partial(
        ray.init, address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=log_to_driver
    )
    try:
        begin()
    except ConnectionAbortedError as error:
        if FORK_FAILED not in str(error):
            raise
        begin()


def address_of(settings: RayProfile) -> str:
    """The address of the head. StageError if none is named."""
    address = settings.address or os.environ.get("RAY_ADDRESS")
    if not address:
        raise StageError(
            "no Ray cluster is named. Fix: set ray: {address: HOST:6379} in the profile, or RAY_ADDRESS"
        )
    return address


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


def wants_token(address: str) -> bool:
    """Whether a cluster that answers refuses a process without a token."""
    import grpc

    return _refuses(address, grpc.insecure_channel(address.removeprefix(CLIENT)))


def _check_token(address: str) -> None:
    """StageError for a token that is not the cluster's, with which Ray would try for half a minute."""
    from ray._private.grpc_utils import init_grpc_channel

    if wants_token(address) and _refuses(address, init_grpc_channel(address.removeprefix(CLIENT))):
        raise StageError(f"the Ray cluster at {address} wants another token. Fix: {TOKEN}")


def _refuses(address: str, channel: Any) -> bool:
    """Whether a cluster, asked whether it is alive, answers that it does not know who asks."""
    import grpc

    question = CLIENT_QUESTION if address.startswith(CLIENT) else QUESTION
    with channel:
        try:
            channel.unary_unary(question)(b"", timeout=CONNECT_SECONDS)
        except grpc.RpcError as error:
            return bool(error.code() is grpc.StatusCode.UNAUTHENTICATED)
    return False


def _check_node_here(address: str) -> None:
    """StageError on a machine without a node of the cluster, where Ray would abort the process."""
    host, _, port = address.rpartition(":")
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            program, *words = process.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if program.endswith("raylet"):
            heads = [word.removeprefix(HEAD).rpartition(":") for word in words if word.startswith(HEAD)]
            if any(at == port and _same_machine(host, head) for head, _, at in heads):
                return
    raise StageError(
        f"this machine has no node of the Ray cluster at {address}. Fix: run `ray start --address={address}"
        f" --num-cpus=0` here, or use the address ray://{host}:10001"
    )


def _same_machine(host: str, head: str) -> bool:
    """Whether two names are of one machine. `head`: an address by which the nodes reach it; `host` may be
    `localhost` on the head itself."""
    addresses = _addresses(host)
    return any(ip_address(address).is_loopback for address in addresses) or bool(addresses & _addresses(head))


def _addresses(host: str) -> set[str]:
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def _reason(error: Exception) -> str:
    """What went wrong, in the first words of Ray's text, and how to mend it."""
    text = " ".join((str(error) or type(error).__name__).split())
    first = text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."
    if "version" in text.lower():
        return f"{first}. Fix: install the same Ray and the same Python on both"
    if "token" in text.lower():
        return f"{first}. Fix: {TOKEN}"
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
    shown = [f"{node['NodeManagerAddress']} has {in_words(node['Resources'])}" for node in living_nodes(ray)]
    return "; ".join(shown) or "the cluster has no node"


def living_nodes(ray: Any) -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def in_words(resources: Mapping[str, float]) -> str:
    """CPUs, GPUs and memory, as people write them."""
    words = [f"{resources.get(name, 0):g} {name}s" for name in ("CPU", "GPU")]
    return ", ".join([*words, f"{resources.get('memory', 0) / 2**30:.1f} GiB"])


class ClusterNeeds(NamedTuple):
    """What a stage asks of a cluster. `nodes`: that it wants at the same time; None for workers, of which one
    with a place is enough. `memory`: bytes."""

    cpus: float
    gpus: float = 0
    memory: float = 0
    nodes: int | None = None

    @property
    def resources(self) -> dict[str, float]:
        """Ray's names of what each node, or worker, is asked for."""
        wanted = {"CPU": self.cpus, "GPU": self.gpus, "memory": self.memory}
        return {name: float(number) for name, number in wanted.items() if number}

    def __str__(self) -> str:
        each = in_words(self.resources)
        return f"a worker with {each}" if self.nodes is None else f"{counted(self.nodes, 'node')} with {each}"

    def fitting(self, ray: Any) -> list[dict[str, Any]]:
        """The nodes of the cluster that could give it, if nobody else used them."""
        wanted = self.resources.items()
        return [
            node
            for node in living_nodes(ray)
            if all(node["Resources"].get(name, 0) >= number for name, number in wanted)
        ]

    def fit(self, ray: Any) -> bool:
        """Whether as many nodes as it wants, or one for a worker, could give it."""
        return len(self.fitting(ray)) >= (self.nodes or 1)


def worker_needs(launch: Launch, profile: Profile, gpus: int) -> ClusterNeeds:
    """What each worker of a stage asks for. `gpus`: those of the model that it holds."""
    workers = launch.workers or Workers()
    held = gpus if profile.ray.gpus else 0
    return ClusterNeeds(workers.cpus or 1, held, workers.memory_bytes or 0)


def lost_in_words(error: Exception) -> str:
    """Ray's explanation of a lost actor, without its ids and its advice."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line and not ABOUT_ACTOR.match(line))
    where = next((f" on {line.removeprefix('ip: ')}" for line in lines if line.startswith("ip: ")), "")
    return f"{type(error).__name__}{where}: {EMPTY.sub('', ADVICE.split(text)[0]).strip()}"

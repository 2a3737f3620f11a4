"""Cost and memory of asking snapshots of robots.txt, by the number of hosts, beside protego with all of them
in memory: `python -m benchmarks.robots`.

Every host has a robots.txt. Three quarters have one of their own, of 3 to 40 rules; a tenth of the hosts are
closed to one agent. The index is built of one JSONL file, then addresses of random hosts are asked, as many
of a host as `--addresses-per-host`. The peer holds a dictionary of host and text, and parses a text when it
meets another host than before. Both have to exclude as many addresses. Each run is a process of its own;
costs are seconds of the processor, `MiB` is the most memory that the process held.

    --hosts               200,000 and 2,000,000 by default
    --addresses           20,000 by default
    --addresses-per-host  in a row, 4 by default
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.measure import memory

AGENTS = ["GPTBot", "CCBot"]


def main() -> None:
    if sys.argv[1:2] == ["--run"]:
        print(json.dumps(RUNS[sys.argv[2]](Path(sys.argv[3]), *map(int, sys.argv[4:]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[200_000, 2_000_000])
    parser.add_argument("--addresses", type=int, default=20_000)
    parser.add_argument("--addresses-per-host", type=int, default=4)
    asked = parser.parse_args()
    print(
        f"{'':8} {'hosts':>10} {'us a host':>10} {'MiB':>7} {'MB on disk':>11} {'addresses/s of a core':>22}"
    )
    for hosts in asked.hosts:
        found: dict[str, dict[str, Any]] = {}
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / "robots.jsonl", hosts)
            for name in RUNS:
                words = [str(number) for number in (hosts, asked.addresses, asked.addresses_per_host)]
                command = [sys.executable, "-m", "benchmarks.robots", "--run", name, folder, *words]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                used = found[name] = json.loads(output)
                print(
                    f"{name:8} {hosts:10,} {1e6 * used['build'] / hosts:10.1f} {used['MiB']:7,.0f}"
                    f" {used['disk'] / 1e6:10,.0f} {asked.addresses / used['ask']:22,.0f}",
                    flush=True,
                )
        ours, peer = found["ours"], found["protego"]
        assert ours["excluded"] == peer["excluded"], "they exclude different numbers of addresses"
        print(
            f"{'':8} ours / protego: memory {ours['MiB'] / peer['MiB']:.2f}, addresses per second of a core"
            f" {peer['ask'] / ours['ask']:.2f}"
        )


def write(path: Path, hosts: int) -> None:
    """A snapshot."""
    with path.open("w") as file:
        for host in range(hosts):
            row = {"url": f"https://site-{host}.example/robots.txt", "status": 200, "text": content(host)}
            file.write(json.dumps(row) + "\n")


def content(host: int) -> str:
    random = Random(host)
    if host % 4 == 0:
        return "User-agent: *\nDisallow:\n"
    rules = [f"Disallow: /{random.getrandbits(40):010x}/" for _ in range(random.randint(3, 40))]
    closed = ["", f"User-agent: {AGENTS[0]}", "Disallow: /"] if host % 10 == 1 else []
    return "\n".join([f"# of site {host}", "User-agent: *", *rules, *closed])


def addresses(hosts: int, count: int, per_host: int) -> Iterator[str]:
    random = Random(1)
    for number in range(count):
        if number % per_host == 0:
            host = random.randrange(hosts)
        yield f"https://site-{host}.example/pages/{number}"


def ours(folder: Path, hosts: int, *asked: int) -> dict[str, float]:
    from apertus_model.data.documents.addresses import parse
    from apertus_model.data.robots.snapshots import load_snapshots
    from specs.robots import RobotsFilter

    source = {"url": str(folder / "robots.jsonl"), "format": "jsonl", "status_column": "status"}
    spec = RobotsFilter.model_validate({"filter": "robots", "agents": AGENTS, "snapshots": [source]})
    begun = time.process_time()
    robots = load_snapshots(spec.model_dump_json(), folder)
    build = time.process_time() - begun
    begun = time.process_time()
    excluded = 0
    for url in addresses(hosts, *asked):
        address = parse(url)
        excluded += address is not None and robots.excluded(address) is not None
    ask = time.process_time() - begun
    disk = next(folder.glob("*.sqlite")).stat().st_size
    return {"build": build, "ask": ask, "MiB": memory()["peak"], "disk": disk, "excluded": excluded}


def protego(folder: Path, hosts: int, *asked: int) -> dict[str, float]:
    from urllib.parse import urlsplit

    from protego import Protego

    begun = time.process_time()
    texts: dict[str, str] = {}
    with (folder / "robots.jsonl").open() as file:
        for line in file:
            row = json.loads(line)
            texts[urlsplit(row["url"]).netloc] = row["text"]
    build = time.process_time() - begun
    begun = time.process_time()
    excluded, before, rules = 0, "", Protego.parse("")
    for url in addresses(hosts, *asked):
        host = urlsplit(url).netloc
        if host != before:
            before, rules = host, Protego.parse(texts[host])
        excluded += not all(rules.can_fetch(url, agent) for agent in AGENTS)
    ask = time.process_time() - begun
    return {"build": build, "ask": ask, "MiB": memory()["peak"], "disk": 0, "excluded": excluded}


RUNS = {"ours": ours, "protego": protego}

if __name__ == "__main__":
    main()

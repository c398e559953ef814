"""
A retrieval server under concurrent load: queries lost, answers given to the wrong query, times, gain of batching.

    python benchmarks/server_load.py --index indexes/atlas indexes/atlas-dense --out benchmarks/results/server.md

Every client asks one query at a time over a connection of its own, as a rollout does. Queries are titles and opening
words of sampled passages. Before the load each is searched in the index directly; an answer whose first passage is
another one than there counts as a wrong pairing. Server and clients are separate processes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from grounded_rl.retrieval import Retriever, build_retriever
from grounded_rl.retrieval.http import HTTPRetriever

NUM_QUERIES = 2_000
WORDS_PER_QUERY = 8
TOP_K = 3
MODES = {"on": [], "off": ["--max-batch", "1", "--max-wait-ms", "0"]}
TIMEOUT_S = 600  # generous: what is slow on a busy machine is not lost
# Titles that many passages share are not enough to tell which one was meant: such queries would test ties.
MIN_SCORE_GAP = 1e-4


def main() -> None:
    """Measure every index, mode and number of clients; print a Markdown report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", type=Path, nargs="+", required=True, help="folders of indexes")
    parser.add_argument("--clients", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each run")
    parser.add_argument("--out", type=Path, help="file for the report")
    args = parser.parse_args()
    rows = []
    for index in args.index:
        expected, backend = expected_passages(index)
        for clients, mode in itertools.product(args.clients, MODES):
            rows.append({"index": backend, "clients": clients, "batching": mode})
            rows[-1] |= measure(index, expected, mode, clients=clients, seconds=args.seconds)
            print(json.dumps(rows[-1]), file=sys.stderr)
    text = report(rows, args.seconds)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")


def expected_passages(index: Path) -> tuple[dict[str, str], str]:
    """Id of the first passage of every query, and a name for the index."""
    retriever: Retriever = build_retriever(index)
    passages = retriever.sample(NUM_QUERIES)
    queries = list(dict.fromkeys(" ".join([p.title, *p.text.split()[:WORDS_PER_QUERY]]) for p in passages))
    # Neighbours of a corpus are alike, and so is what they cost to find: runs of any length must see the same mix.
    random.Random(0).shuffle(queries)
    found = retriever.search(queries, TOP_K)
    expected = {
        query: hits[0].passage.id
        for query, hits in zip(queries, found, strict=True)
        if hits and (len(hits) == 1 or hits[0].score - hits[1].score > MIN_SCORE_GAP)
    }
    return expected, f"{retriever.manifest['backend']}, {retriever.manifest['num_passages']:,} passages"


def measure(
    index: Path, expected: dict[str, str], mode: str, *, clients: int, seconds: float
) -> dict[str, float | int]:
    """Load one server and count."""
    command = [sys.executable, "-m", "grounded_rl", "serve", "--index", str(index), "--port", "0", *MODES[mode]]
    command += ["--request-timeout", str(TIMEOUT_S)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        url = re.search(r" at (http://\S+) ", line).group(1)
        retriever = HTTPRetriever(url)
        wait_until_ready(retriever)
        before = cpu_seconds(server.pid)
        counts = asyncio.run(load(url, expected, clients=clients, seconds=seconds))
        counts["cpu_ms"] = 1000 * (cpu_seconds(server.pid) - before) / counts["sent"]
        retriever.close()
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
    return counts


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_ready(retriever: HTTPRetriever) -> None:
    """Wait for the index to open."""
    deadline = time.monotonic() + 300
    while True:
        try:
            return retriever.ready()
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


async def load(url: str, expected: dict[str, str], *, clients: int, seconds: float) -> dict[str, float | int]:
    """Ask from many clients at once until the time is up; every request that was begun is finished."""
    times: list[float] = []
    counts = {"sent": 0, "lost": 0, "wrong": 0}
    queries = itertools.cycle(expected)
    address = urlsplit(url)
    started = time.monotonic()

    async def client() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        while time.monotonic() - started < seconds:
            query = next(queries)
            counts["sent"] += 1
            begun = time.monotonic()
            try:
                passage_id = await asyncio.wait_for(ask(reader, writer, query), TIMEOUT_S)
            except (OSError, ValueError, LookupError, asyncio.IncompleteReadError, TimeoutError):
                counts["lost"] += 1
                writer.close()
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
                continue
            times.append(time.monotonic() - begun)
            counts["wrong"] += passage_id != expected[query]
        writer.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    elapsed = time.monotonic() - started
    ordered = sorted(times)
    quantiles = {f"p{q}_ms": 1000 * ordered[int(q / 100 * (len(ordered) - 1))] for q in (50, 95)} if ordered else {}
    return {**counts, "per_second": len(times) / elapsed, **quantiles}


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, query: str) -> str:
    """Id of the first passage; raises unless the answer is complete and a success."""
    body = json.dumps({"queries": [query], "topk": TOP_K, "return_scores": True}).encode()
    head = (
        f"POST /retrieve HTTP/1.1\r\nHost: load\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    writer.write(head.encode() + b"\r\n" + body)
    await writer.drain()
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    content = await reader.readexactly(int(headers["content-length"]))
    if " 200 " not in lines[0]:
        raise ValueError(f"{lines[0]}: {content[:200]!r}")
    (hits,) = json.loads(content)["result"]
    return hits[0]["document"]["id"]


def report(rows: list[dict], seconds: float) -> str:
    """A Markdown page."""
    lines = [
        "# Retrieval server under load",
        "",
        f"`python benchmarks/server_load.py`, {seconds:g} s per row, one query per request, top {TOP_K}; "
        f"{os.cpu_count()} CPUs shared by server and clients (load average at the end {os.getloadavg()[1]:.1f}), "
        f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}.",
        "",
        "Where other programs share the CPUs, times are upper bounds, and the server's CPU time per request is what",
        "to compare. Gains are those of batching, by requests per second and by CPU time.",
        "",
        "| index | clients | batching | requests | lost | mispaired | requests/s | p50 ms | p95 ms | CPU ms | gain |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        without = next(r for r in rows if {**r, **_key(row, "off")} == r)
        gains = (row["per_second"] / without["per_second"], without["cpu_ms"] / row["cpu_ms"])
        gain = "{:.1f} x, {:.1f} x".format(*gains) if row["batching"] == "on" else ""
        cells = [row["index"], row["clients"], row["batching"], f"{row['sent']:,}", row["lost"], row["wrong"]]
        cells += [f"{row.get(name, 0):,.0f}" for name in ("per_second", "p50_ms", "p95_ms")]
        cells.append(f"{row['cpu_ms']:.1f}")
        lines.append("| " + " | ".join(map(str, [*cells, gain])) + " |")
    return "\n".join(lines)


def _key(row: dict, mode: str) -> dict:
    """What names the row of the same setting in another mode."""
    return {"index": row["index"], "clients": row["clients"], "batching": mode}


if __name__ == "__main__":
    main()

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grounded_rl.cli import main
from grounded_rl.errors import BackendUnavailableError, RetrievalError
from grounded_rl.retrieval.bm25 import BM25Retriever, build_bm25_index
from grounded_rl.retrieval.http import HTTPRetriever
from tests.retrieval import contract

pytest.importorskip("uvicorn", reason="needs the extra `serve`")
pytest.importorskip("fastapi", reason="needs the extra `serve`")
pytest.importorskip("httpx", reason="needs the extra `serve`")

TOKEN = "a-token-of-enough-letters"


@pytest.fixture(scope="module")
def index(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("serve")
    build_bm25_index(contract.write_corpus(folder / "corpus.jsonl", contract.PASSAGES), folder / "index")
    return folder / "index"


@contextlib.contextmanager
def served(index, *options, **environment):
    """A server in a process of its own; yields the process and its address."""
    command = [sys.executable, "-m", "grounded_rl", "serve", "--index", str(index), "--port", "0", *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    try:
        line = process.stdout.readline()
        found = re.search(r" at (http://127\.0\.0\.1:\d+) ", line)
        assert found, line + process.stderr.read()
        yield process, found.group(1), line
    finally:
        process.kill()
        process.communicate()


def wait_until_ready(retriever):
    deadline = time.monotonic() + 60
    while True:
        try:
            return retriever.ready()
        except BackendUnavailableError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_served_index_answers_as_the_index_itself_until_it_is_told_to_stop(index):
    with served(index) as (process, url, line):
        assert "(74 passages, bm25, id " in line
        assert "without a token" in line
        retriever = HTTPRetriever.connect(url)
        wait_until_ready(retriever)
        queries = ["capital of Peru", "", "lighthouse"]
        assert retriever.search(queries, 3) == BM25Retriever.open(index).search(queries, 3)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=30)
        assert (process.returncode, output, errors) == (0, "Stopped\n", "")
        with pytest.raises(BackendUnavailableError, match="cannot be reached"):
            retriever.search(queries, 3)


def test_the_token_of_the_environment_is_required_and_not_printed(index):
    with served(index, GROUNDED_RL_SERVER_TOKEN=TOKEN + "\n") as (process, url, line):
        assert "with a token" in line
        with pytest.raises(RetrievalError, match="refused the token"):
            HTTPRetriever.connect(url)
        retriever = HTTPRetriever.connect(url, token=TOKEN)
        wait_until_ready(retriever)
        assert retriever.search(["Peru"], 1)[0]
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert TOKEN not in line + output + errors


def test_an_index_that_cannot_be_opened_ends_the_server_with_one_line(index, monkeypatch, capsys):
    def fail(*_, **__):
        raise RetrievalError("The index was written by another release.")

    monkeypatch.setattr("grounded_rl.retrieval.build.build_retriever", fail)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert main(["serve", "--index", str(index), "--port", "0"]) == 2
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    output, errors = capsys.readouterr()
    assert output.startswith("Serving ")
    assert errors == "error: The index was written by another release.\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--index", "absent"], "must be the folder of an index: got `absent` (no such folder)"),
        (["--index", "INDEX", "--host", "0.0.0.0"], "`host` must be a loopback address while there is no token"),
        (["--index", "INDEX", "--host", "192.0.2.1", "--allow-unauthenticated"], "this process may listen on"),
        (["--index", "INDEX", "--host", "no.such.host.invalid", "--allow-unauthenticated"], "of this machine"),
        (["--index", "INDEX", "--max-k", "0"], "`max_k` must be at least 1: got 0"),
        (["--index", "INDEX", "--port", "many"], "argument --port: invalid int value"),
        (["--index", "INDEX", "--workers"], "expected one argument"),
        ([], "--index"),
    ],
)
def test_a_mistake_is_one_line_and_status_two(index, options, message, capsys, monkeypatch):
    monkeypatch.delenv("GROUNDED_RL_SERVER_TOKEN", raising=False)
    assert main(["serve", *(str(index) if option == "INDEX" else option for option in options)]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert message in errors
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1


def test_a_port_in_use_is_one_line(index, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--index", str(index), "--port", str(port)]) == 2
    assert f"`port` must be free: got 127.0.0.1:{port}, which is in use." in capsys.readouterr().err


def test_help_shows_examples(capsys):
    assert main(["serve", "--help"]) == 0
    examples = capsys.readouterr().out.partition("examples:")[2]
    assert "grounded-rl serve --index" in examples
    assert "curl http://127.0.0.1:8000/retrieve" in examples

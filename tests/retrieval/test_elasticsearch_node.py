"""The node of the tests: a real server that keeps its data, leaves nothing behind, and is what it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("elasticsearch", reason="the extra `elasticsearch` is not installed")

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval.elasticsearch import ElasticsearchRetriever
from tests.retrieval.es_indices import call
from tests.retrieval.es_node import ElasticsearchNode
from tests.retrieval.es_node_parts import PartsMissingError, clear_final, prepare_node

pytestmark = pytest.mark.elasticsearch

REPOSITORY = Path(__file__).resolve().parents[2]


def test_it_is_elasticsearch_7(es_node):
    facts = call(es_node.url, "GET", "/")
    assert (facts["version"]["number"], facts["tagline"]) == ("7.0.0", "You Know, for Search")
    assert facts["version"]["lucene_version"].startswith("8.")


def test_a_node_as_it_was_is_refused_by_name_and_keeps_its_data_through_a_kill(make_es_node):
    node = make_es_node(modern_clients=False)
    with pytest.raises(ConfigurationError, match=r"Elasticsearch 8\.18 or newer: got Elasticsearch .* 7\.0\.0 at"):
        ElasticsearchRetriever.connect(node.url, "kept")
    call(node.url, "PUT", "/kept/_doc/1", {"text": "kept"})
    url, pid = node.url, node.pid
    node.kill()
    assert not node.is_running
    assert not psutil.pid_exists(pid)
    node.restart()
    assert node.url == url
    assert node.pid != pid
    assert call(node.url, "GET", "/kept/_doc/1")["_source"] == {"text": "kept"}
    home = node.log_path.parent
    assert home.is_dir()
    node.stop()
    assert not home.exists()


def test_a_killed_parent_leaves_no_node_behind():
    try:
        prepare_node()
    except PartsMissingError as error:
        pytest.skip(str(error))
    program = (
        "import sys, time\n"
        "from tests.retrieval.es_node import ElasticsearchNode\n"
        "node = ElasticsearchNode().start()\n"
        "print(node.pid, node.log_path.parent, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        pid_text, home = parent.stdout.readline().split()
        node = psutil.Process(int(pid_text))
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        node.wait(60)
        assert not psutil.pid_exists(node.pid)
    finally:
        parent.kill()
        parent.stdout.close()
    subprocess.run(["rm", "-rf", home], check=True)


def test_a_setting_that_does_not_exist_is_reported_with_the_log():
    try:
        node = ElasticsearchNode({"no.such.setting": "1"})
    except PartsMissingError as error:
        pytest.skip(str(error))
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"unknown setting \[no\.such\.setting\]"):
        node.start()
    assert time.monotonic() - started < 120
    assert not node.is_running
    node.stop()


def test_only_a_method_that_exists_can_be_opened():
    try:
        parts = prepare_node()
    except PartsMissingError as error:
        pytest.skip(str(error))
    patched = (parts.classes / "org/apache/lucene/search/IndexSearcher.class").read_bytes()
    with pytest.raises(ValueError, match="has no method `noSuchMethod"):
        clear_final(patched, "noSuchMethod", "()V")

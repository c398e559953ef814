from __future__ import annotations

import pytest

from grounded_rl.errors import ConfigurationError
from grounded_rl.retrieval import plan
from grounded_rl.retrieval.plan import check_resources, dense_estimate, estimates, plan_table

WIKI, DIMS = 21_015_324, 768
GIB = 1 << 30


def by_kind() -> dict[str, plan.Estimate]:
    return {row.kind: row for row in estimates(WIKI, DIMS)}


@pytest.mark.parametrize(
    ("kind", "gibibytes"),
    # Vectors and graph for 21,015,324 x 768 by the formulas of Elastic's documentation, m = 16.
    [("hnsw", 61.4), ("int8_hnsw", 16.4), ("int4_hnsw", 8.8), ("bbq_hnsw", 3.4)],
)
def test_memory_on_the_server_is_vectors_and_graph_above_a_search_by_words(kind, gibibytes):
    rows = by_kind()
    above = rows[kind].search_memory - rows["bm25 only"].search_memory
    assert above / GIB == pytest.approx(gibibytes, abs=0.06)


def test_disk_on_the_server_keeps_the_raw_vectors():
    rows = by_kind()
    text = rows["bm25 only"].disk
    # 60.1 raw + 1.3 graph; 15.1 and 2.2 for the small vectors beside them.
    assert (rows["hnsw"].disk - text) / GIB == pytest.approx(61.4, abs=0.06)
    assert (rows["int8_hnsw"].disk - text) / GIB == pytest.approx(76.5, abs=0.06)
    assert (rows["bbq_hnsw"].disk - text) / GIB == pytest.approx(63.5, abs=0.15)


def test_memory_of_dense_indexes_follows_their_formulas():
    rows = by_kind()
    assert rows["Flat"].search_memory == 4 * WIKI * DIMS
    assert rows["IVF,SQ8"].search_memory == WIKI * (DIMS + 8)
    assert dense_estimate("Flat", WIKI, DIMS, vector_bytes=2).search_memory == 2 * WIKI * DIMS
    assert rows["HNSW"].build_memory > rows["HNSW"].search_memory > rows["IVF,SQ8"].search_memory


def test_memory_of_a_streamed_build_hardly_depends_on_the_corpus():
    for kind in ("Flat", "IVF,SQ8"):
        small, large = (dense_estimate(kind, count, 768).build_memory for count in (1_000_000, 21_000_000))
        assert large - small == 8 * 20_000_000


def test_the_table_has_a_row_per_option_with_its_basis():
    lines = plan_table(estimates(WIKI, DIMS)).splitlines()
    assert len(lines) == 2 + 1 + 3 + 5
    assert all(line.count("|") == 7 for line in lines)
    assert "| elasticsearch | int8_hnsw |" in "\n".join(lines)
    assert all(line.rsplit("|", 2)[1].strip() for line in lines[2:])


@pytest.mark.parametrize("size", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_below_one_are_refused(size):
    with pytest.raises(ConfigurationError, match="must be at least 1: got 0"):
        estimates(size[0], size[1], links=size[2])


def test_a_build_that_does_not_fit_is_refused_before_it_begins(tmp_path, monkeypatch):
    check_resources(dense_estimate("Flat", 1000, 64), tmp_path / "a" / "b")
    monkeypatch.setattr(plan, "available_memory", lambda: None)
    with pytest.raises(ConfigurationError, match=r"must have room for about [\d,.]+ GiB: got [\d,.]+ GiB free"):
        check_resources(dense_estimate("Flat", 10**12, 768), tmp_path)
    monkeypatch.setattr(plan, "available_memory", lambda: 1 << 20)
    with pytest.raises(ConfigurationError, match=r"`HNSW` must fit into memory while it is built, about [\d.]+ GiB"):
        check_resources(dense_estimate("HNSW", 1000, 64), tmp_path)


def test_memory_is_what_the_system_says_is_available():
    memory = plan.available_memory()
    assert memory is not None
    assert 0 < memory < 1 << 50

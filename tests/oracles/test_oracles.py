"""The replay itself: shipped recordings agree, and a disagreement or a strange folder is reported, not passed over."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.oracles.__main__ import main
from tests.oracles.comparison import Differences, difference
from tests.oracles.registry import REPLAYERS, replay_file

TIPS = {"method": "tips_phi", "cases": [{"mean_logp": [[-1.0], [-0.5]], "phi": [-1.0, -0.5], "delta": [0.5]}]}


@pytest.mark.parametrize("method", sorted(REPLAYERS))
def test_recorded_outputs_are_reproduced(method: str, shared_dir: Path):
    path = shared_dir / "oracles" / f"{method}.json"
    if not path.exists():
        pytest.skip(f"no recording of {method}")
    report = replay_file(path)
    assert report.differences.failures == []
    assert report.num_cases > 0
    assert report.differences.num_values >= report.num_cases


def test_every_shipped_recording_has_a_replayer(shared_dir: Path):
    assert {path.stem for path in (shared_dir / "oracles").glob("*.json")} <= set(REPLAYERS)


def write(folder: Path, name: str, content: object) -> None:
    (folder / name).write_text(json.dumps(content), encoding="utf-8")


def test_an_agreeing_folder_exits_with_zero_and_one_line_a_file(tmp_path: Path, capsys: pytest.CaptureFixture):
    write(tmp_path, "a.json", TIPS)
    write(tmp_path, "b.json", TIPS)
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["a.json", "b.json"]
    assert all("1 cases" in line and line.endswith("pass") for line in lines[:2])


def test_a_disagreement_exits_with_one_and_names_the_value(tmp_path: Path, capsys: pytest.CaptureFixture):
    wrong = {**TIPS, "cases": [{**TIPS["cases"][0], "delta": [0.5001]}]}
    write(tmp_path, "a.json", wrong)
    assert main([str(tmp_path)]) == 1
    output = capsys.readouterr().out
    assert "FAIL at case 0 delta" in output
    assert "recorded 0.5001" in output


def test_a_difference_below_the_tolerance_passes(tmp_path: Path):
    write(tmp_path, "a.json", {**TIPS, "cases": [{**TIPS["cases"][0], "delta": [0.500009]}]})
    assert main([str(tmp_path)]) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"method": "unheard_of", "cases": []}, "known format"),
        ({"method": "tips_phi"}, "object with `cases`"),
        ({"method": "tips_phi", "cases": [{"phi": []}]}, "must follow the format"),
        ([1, 2], "object with `cases`"),
    ],
)
def test_a_file_that_cannot_be_replayed_exits_with_two_and_one_line(
    content: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture
):
    write(tmp_path, "a.json", content)
    assert main([str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert message in errors
    assert "a.json" in errors


def test_text_that_is_not_json_exits_with_two(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "a.json").write_text("{", encoding="utf-8")
    assert main([str(tmp_path)]) == 2
    assert "readable JSON" in capsys.readouterr().err


def test_a_missing_or_empty_folder_exits_with_two(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert main([str(tmp_path)]) == 2
    assert main([]) == 2
    errors = capsys.readouterr().err
    assert "no such folder" in errors
    assert "no *.json" in errors
    assert "usage" in errors


def test_the_file_name_gives_the_format_when_the_content_does_not(tmp_path: Path):
    write(tmp_path, "tips_phi.json", {"cases": TIPS["cases"]})
    assert main([str(tmp_path)]) == 0


def test_a_file_without_cases_does_not_pass(tmp_path: Path):
    write(tmp_path, "a.json", {"method": "tips_phi", "cases": []})
    assert main([str(tmp_path)]) == 1


def test_differences_between_kinds_of_values_are_infinite():
    assert difference("a", "a") == 0.0
    assert difference("a", "b") == math.inf
    assert difference(None, 1.0) == math.inf
    assert difference(math.nan, 1.0) == math.inf
    assert difference(1.0, math.nan) == math.inf
    assert difference(math.nan, math.nan) == 0.0
    assert difference(math.inf, math.inf) == 0.0
    result = Differences()
    result.compare("lengths", [1.0], [1.0, 2.0])
    assert result.failures == ["lengths, 1 values, recorded 2"]

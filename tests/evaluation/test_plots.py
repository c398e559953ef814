import json
import struct

import numpy as np
import pytest

from grounded_rl.errors import ConfigurationError
from grounded_rl.evaluation import plots
from grounded_rl.evaluation.comparison import compare
from grounded_rl.evaluation.metrics import compute_metrics
from tests.builders import TYPE_SCRIPTS, make_rollout


def evaluation(types):
    return [make_rollout(TYPE_SCRIPTS[letter], question_id=f"q{number}") for number, letter in enumerate(types)]


@pytest.fixture
def drawn(monkeypatch):
    """The figure of every plot made in the test."""
    figures = []
    original = plots._figure

    def remember(*size):
        figures.append(original(*size))
        return figures[-1]

    monkeypatch.setattr(plots, "_figure", remember)
    return figures


def size_of(path):
    """Width and height of a PNG, from its first chunk."""
    return struct.unpack(">II", path.read_bytes()[16:24])


def test_bars_and_whiskers_show_the_numbers_of_the_comparison(tmp_path, drawn):
    comparison = compare(evaluation("CCBAD"), evaluation("ACAAD"), num_resamples=100)
    path = plots.plot_comparison(comparison, tmp_path / "deep" / "metrics.png")
    assert size_of(path) > (900, 600)
    values, differences = drawn[0].axes
    heights = [patch.get_height() for patch in values.patches]
    assert heights[:2] == pytest.approx([40.0, 40.0])  # EM and ToolHit before
    assert heights[5:7] == pytest.approx([80.0, 60.0])  # and after
    points = differences.lines[1].get_ydata()
    assert points[0] == pytest.approx(40.0)
    assert [label.get_text() for label in differences.get_xticklabels()][:2] == ["EM", "ToolHit"]


def test_undefined_metrics_are_dashes_and_no_bars(tmp_path, drawn):
    plots.plot_comparison(compare(evaluation("CC"), evaluation("AA"), num_resamples=20), tmp_path / "m.png")
    assert "–" in [text.get_text() for text in drawn[0].axes[0].texts]


def test_type_shares_stack_to_the_whole(tmp_path, drawn):
    runs = {"before": compute_metrics(evaluation("CCBA")), "after": compute_metrics(evaluation("AABD"))}
    plots.plot_types(runs, tmp_path / "types.png")
    widths = np.array([patch.get_width() for patch in drawn[0].axes[0].patches]).reshape(4, 2)
    assert widths.sum(axis=0) == pytest.approx([100, 100])
    assert widths[:, 0] == pytest.approx([25, 25, 50, 0])


def test_training_curves_are_drawn_for_what_was_logged_most_wanted_first(tmp_path, drawn):
    log = [
        {"step": step, "epoch": 0.1, "loss": 1 / step, "reward": 0.1 * step, "rollout/em": 0.5, "train_runtime": 3.0}
        for step in range(1, 21)
    ]
    log.append({"step": 21, "train_loss": 0.3})
    plots.plot_training(log, tmp_path / "training.png")
    panels = [axes for axes in drawn[0].axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == ["reward", "rollout/em", "loss"]
    assert panels[0].lines[0].get_ydata()[-1] == pytest.approx(2.0)


def test_smoothing_is_a_centred_mean_that_shrinks_at_the_ends():
    # window 3: (0+3)/2, (0+3+6)/3, (3+6+0)/3, (6+0)/2
    assert plots._smoothed([0.0, 3.0, 6.0, 0.0], 3) == pytest.approx([1.5, 3.0, 3.0, 3.0])


def test_a_constant_is_drawn_flat_and_not_as_its_rounding_error(tmp_path, drawn):
    log = [{"step": step, "reward": 0.1 + 0.2 if step % 2 else 0.3} for step in range(9)]
    plots.plot_training(log, tmp_path / "training.png")
    low, high = drawn[0].axes[0].get_ylim()
    assert high - low > 0.05


def test_the_same_numbers_give_the_same_bytes(tmp_path):
    runs = {"run": compute_metrics(evaluation("ABCD"))}
    first, second = (plots.plot_types(runs, tmp_path / f"{name}.png").read_bytes() for name in "ab")
    assert first == second


def test_names_are_text_and_not_formulas(tmp_path, drawn):
    plots.plot_training([{"step": 1, "cost$x": 1.0}, {"step": 2, "cost$x": 2.0}], tmp_path / "t.png")
    assert drawn[0].axes[0].get_title(loc="left") == r"cost\$x"


def test_an_empty_log_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="`log_history` must hold at least two finite values"):
        plots.plot_training([{"step": 1, "reward": 0.5}], tmp_path / "t.png")


def test_a_quantity_that_was_not_logged_is_named(tmp_path):
    log = [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.6}]
    with pytest.raises(ConfigurationError, match=r"got none of \['rewards'\]. Choose from \['reward'\]"):
        plots.plot_training(log, tmp_path / "t.png", metrics=["rewards"])


def test_the_log_of_a_checkpoint_is_read_from_its_folder(tmp_path):
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 1, "loss": 0.5}]}))
    assert plots.load_log_history(tmp_path) == [{"step": 1, "loss": 0.5}]
    assert plots.load_log_history(tmp_path / "trainer_state.json") == [{"step": 1, "loss": 0.5}]


def test_a_folder_without_a_log_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"must be a `trainer_state.json` or its folder"):
        plots.load_log_history(tmp_path)
    (tmp_path / "trainer_state.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="must hold a `log_history`"):
        plots.load_log_history(tmp_path)

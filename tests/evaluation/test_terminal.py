import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from grounded_rl.evaluation.terminal import (
    clip,
    common_advantage,
    example_of_each_type,
    render_examples,
    render_rollout,
    render_summary,
)
from grounded_rl.grounding import diagnose
from tests.builders import TYPE_SCRIPTS, answer_turn, make_passage, make_rollout, malformed_turn, search_turn

HOSTILE = "[bold red]markup[/] [/nope] [link=file:///etc/passwd]x[/link] \x1b[2J\x1b]0;owned\x07 :smile: <script>"


def plain(renderable, width=120):
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(renderable)
    return console.file.getvalue()


def coloured(renderable, width=120):
    console = Console(file=io.StringIO(), width=width, highlight=False, force_terminal=True, color_system="truecolor")
    console.print(renderable)
    return console.file.getvalue()


def test_a_rollout_shows_question_gold_answer_type_queries_and_segments():
    text = plain(render_rollout(make_rollout("miss malformed hit wrong", answers=["Paris", "Lutetia"])))
    assert "What is the capital of France?" in text
    assert "Paris | Lutetia" in text
    assert "Lyon  ✗ no match" in text
    assert "B  evidence found, answer wrong" in text
    assert "⌕ capital of France" in text
    labels = re.findall(r"turn \d · ([a-z ]+) ·", text)
    assert labels == ["useful search", "residual search", "useful search", "answer"]
    assert "rejected: invalid_json" in text
    assert "The call could not be read." in text


def test_the_matched_alias_is_marked_in_its_passage_only():
    styled = coloured(render_rollout(make_rollout([search_turn("Nothing.", "It is PARIS, they say."), "right"])))
    assert re.search(r"\x1b\[1;30;103mPARIS\x1b\[0m", styled)
    assert len(re.findall(r"\x1b\[1;30;103m", styled)) == 1
    assert "● Title" in plain(render_rollout(make_rollout("hit right")))
    assert "● Title" not in plain(render_rollout(make_rollout("miss right")))


def test_a_late_answer_stays_in_view_when_its_passage_is_shortened():
    passage = "filler " * 2000 + "and then Paris appears" + " filler" * 2000
    text = plain(render_rollout(make_rollout([search_turn(passage), "right"]), max_characters=200), width=300)
    assert "and then Paris appears" in text
    assert len(text) < 4000


def test_segments_and_types_have_their_colours():
    styled = coloured(render_rollout(make_rollout("hit miss right")))
    assert "38;2;0;114;178m" in styled  # useful search
    assert "38;2;213;94;0m" in styled  # residual search
    assert "38;2;0;158;115mA" in styled  # type A


def test_credit_shades_tokens_by_advantage():
    rollout = make_rollout([search_turn("Paris", text="aabbcc", advantages=[1.0, 0.0, -1.0]), "right"])
    styled = coloured(render_rollout(rollout, credit=True))
    assert "\x1b[30;48;2;0;158;115maa\x1b[0mbb\x1b[30;48;2;213;94;0mcc\x1b[0m" in styled
    assert "advantage -1.0000 … +1.0000" in plain(render_rollout(rollout, credit=True))
    assert "48;2;" not in coloured(render_rollout(rollout))


def test_the_residual_shades_what_was_added_to_the_common_advantage():
    turn = search_turn("Paris", text="aabbcc", advantages=[-0.5, -0.5, -0.45])
    rollout = make_rollout([turn, answer_turn("Paris", advantages=[-0.5, -0.5])], answer="Paris")
    assert common_advantage(rollout) == -0.5
    styled = coloured(render_rollout(rollout, residual=True))
    assert "aabb\x1b[30;48;2;0;158;115mcc\x1b[0m" in styled
    assert "advantage minus -0.5000" in plain(render_rollout(rollout, residual=True))


def test_the_recorded_advantage_is_believed_over_the_most_common_one():
    turn = search_turn("Paris", text="aabbcc", advantages=[-0.475, -0.475, -0.55])
    rollout = replace(
        make_rollout([turn, answer_turn("Paris", advantages=[-0.475, -0.475])]), extras={"advantage": -0.5}
    )
    assert common_advantage(rollout) == -0.5


def test_never_scored_is_told_apart_from_scored_with_zero():
    assert "never scored" in plain(render_rollout(make_rollout("hit right"), credit=True))
    zero = make_rollout([search_turn("Paris", advantages=[0.0, 0.0, 0.0]), "right"])
    assert "never scored" not in plain(render_rollout(zero, credit=True))


def test_tokens_of_a_given_tokenizer_are_exact():
    rollout = make_rollout([search_turn("Paris", ids=(1, 2), text="ignored", advantages=[1.0, 0.0]), "right"])
    styled = coloured(render_rollout(rollout, credit=True, decode=lambda ids: "".join(f"<{token}>" for token in ids)))
    assert "\x1b[30;48;2;0;158;115m<1>\x1b[0m<2>" in styled
    assert "approximate" not in styled


@pytest.mark.parametrize("credit", [False, True])
def test_hostile_text_is_shown_and_never_interpreted(credit):
    turn = search_turn(make_passage(HOSTILE, title=HOSTILE, passage_id=HOSTILE), query=HOSTILE, text=HOSTILE * 3)
    rollout = make_rollout(
        [turn, malformed_turn(text=HOSTILE, error=HOSTILE), answer_turn(HOSTILE, advantages=[0.5, 0.1])],
        question_id=HOSTILE,
        question=HOSTILE,
        answers=[HOSTILE],
        answer=HOSTILE,
        question_kind=HOSTILE,
        rewards={HOSTILE: 1.0},
    )
    for renderable in (
        render_rollout(rollout, credit=credit),
        render_summary([rollout, make_rollout()], title=HOSTILE),
    ):
        text = plain(renderable, width=400)
        assert "[bold red]markup[/]" in text
        assert "\x1b" not in text
        assert "\x07" not in text
        styled = coloured(renderable, width=400)
        assert "\x1b[2J" not in styled
        assert "\x1b]" not in styled


def test_a_very_long_line_is_shortened_and_says_by_how_much():
    text = plain(render_rollout(make_rollout([search_turn("x" * 100_000, text="y" * 100_000), "right"])))
    assert len(text) < 10_000
    assert "… (+98,500 characters)" in text


def test_many_short_lines_are_cut_as_well():
    assert clip("a\n" * 1000, 100) == "a\na\na\na… (+1,993 characters)"
    assert clip("short", 100) == "short"


def test_failed_rollouts_show_their_error():
    assert "connection refused" in plain(render_rollout(make_rollout("miss", error="connection refused")))


def test_a_cut_passage_says_so():
    passage = make_passage("Half a text").__class__("p", "T", "Half", num_tokens=10, num_tokens_full=30)
    assert "cut to 10 of 30 tokens" in plain(render_rollout(make_rollout([search_turn(passage), "right"])))


def test_the_summary_has_a_column_per_kind():
    rollouts = [
        make_rollout(script, question_id=script, question_kind="ab"[i % 2])
        for i, script in enumerate(TYPE_SCRIPTS.values())
    ]
    text = plain(render_summary(rollouts, title="runs/gca"))
    row = next(line for line in text.splitlines() if "HitAcc" in line)
    # all: A and B hit, A right; a: A and C; b: B and D
    assert row.split()[1:] == ["50.0", "%", "100.0", "%", "0.0", "%"]
    assert "A 25 %  B 25 %  C 25 %  D 25 %" in text
    assert "runs/gca" in text


def test_the_type_bar_fills_its_width_whatever_the_shares():
    rollouts = [make_rollout(TYPE_SCRIPTS[letter], question_id=str(i)) for i, letter in enumerate("AABBBCD")]
    assert plain(render_summary(rollouts)).count("█") == 48


def test_a_summary_of_failures_only_is_dashes():
    text = plain(render_summary([make_rollout("miss", error="index gone")]))
    assert next(line for line in text.splitlines() if " EM" in line).split() == ["EM", "–"]


def test_the_examples_are_the_first_of_each_type_in_order():
    rollouts = [make_rollout(TYPE_SCRIPTS[letter], question_id=f"{letter}{i}") for i, letter in enumerate("CDDACB")]
    rollouts.insert(0, make_rollout("hit right", question_id="failed", error="index gone"))
    examples = example_of_each_type(rollouts)
    assert [rollout.question_id for rollout in examples] == ["A3", "B5", "C0", "D1"]
    assert [str(diagnose(rollout).type) for rollout in examples] == list("ABCD")
    assert plain(render_examples(rollouts)).count("question  What") == 4

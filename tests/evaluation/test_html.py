import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from grounded_rl.evaluation.html import page_data, render_html, script_safe_json, utf16_spans, write_html
from tests.builders import TYPE_SCRIPTS, answer_turn, make_group, make_passage, make_rollout, search_turn

HOSTILE = "</script><script>window.owned=1</script><img src=x onerror=window.owned=2><!--$data ${title}"


class Elements(HTMLParser):
    """Every start tag with its attributes, and the text of elements by id or name."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts, self.current = [], {}, None
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        self.current = attributes.get("id") or tag

    def handle_endtag(self, tag):
        self.current = None

    def handle_data(self, data):
        if self.current is not None:
            self.texts[self.current] = self.texts.get(self.current, "") + data


def embedded(page):
    return json.loads(Elements(page).texts["data"])


def hostile_rollout():
    return make_rollout(
        [search_turn(make_passage(HOSTILE, title=HOSTILE, passage_id=HOSTILE), query=HOSTILE), answer_turn(HOSTILE)],
        question_id=HOSTILE,
        question=HOSTILE,
        answers=[HOSTILE],
        answer=HOSTILE,
        question_kind=HOSTILE,
        rewards={HOSTILE: 1.0},
        extras={HOSTILE: HOSTILE},
    )


def test_the_page_loads_nothing_from_elsewhere():
    page = render_html([make_rollout()])
    for tag, attributes in Elements(page).tags:
        assert tag not in {"iframe", "object", "embed", "base", "img"}
        assert not attributes.get("src")
        assert attributes.get("href", "data:").startswith("data:")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert "@import" not in page
    assert "url(" not in page


def test_only_the_pages_own_script_and_style_may_run():
    elements = Elements(render_html([hostile_rollout()]))
    policy = next(
        attributes["content"]
        for _, attributes in elements.tags
        if "content" in attributes and "http-equiv" in attributes
    )
    for name in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(elements.texts[name].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_hostile_text_adds_no_element_and_comes_back_unchanged():
    harmless, hostile = render_html([make_rollout()]), render_html([hostile_rollout()], title=HOSTILE)
    assert [tag for tag, _ in Elements(hostile).tags] == [tag for tag, _ in Elements(harmless).tags]
    (record,) = embedded(hostile)["rollouts"]
    assert record["question"] == record["answer"] == record["id"] == record["kind"] == HOSTILE
    assert embedded(hostile)["passages"] == [[HOSTILE, HOSTILE, HOSTILE]]


def test_the_script_never_parses_text_as_markup():
    script = Elements(render_html([make_rollout()])).texts["script"]
    for name in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        'setAttribute("on',
    ):
        assert name not in script


def test_embedded_json_has_no_character_that_means_something_to_html():
    value = {"<!--": "</script>&amp;\u2028\u2029\ud800é"}
    text = script_safe_json(value)
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == value


def test_numbers_that_json_lacks_become_null():
    turn = search_turn("Paris", advantages=[float("nan"), float("inf"), 0.25], logps=[-1.0, -2.0, float("-inf")])
    rollout = make_rollout([turn, "right"], rewards={"em": float("nan"), "format": None})
    (record,) = embedded(render_html([rollout]))["rollouts"]
    assert record["turns"][0]["credit"] == {"values": [None, None, 0.25], "logps": [-1.0, -2.0, None]}
    assert record["rewards"] == {"em": None, "format": None}


def test_spans_count_as_javascript_does():
    # Each 😀 is one character here and two units there.
    assert utf16_spans("😀 Paris 😀", [(2, 7), (8, 9)]) == [[3, 8], [9, 11]]
    assert utf16_spans("é Paris", [(2, 7)]) == [[2, 7]]


def test_a_passage_is_stored_once_however_often_it_was_shown():
    data = page_data(list(make_group("hit hit right", "hit wrong").rollouts))
    assert len(data["passages"]) == 1
    shown = [call["passages"][0]["passage"] for r in data["rollouts"] for turn in r["turns"] for call in turn["calls"]]
    assert shown == [0, 0, 0]


def test_rollouts_share_a_path_exactly_as_far_as_their_tokens_agree():
    first = search_turn("Paris", ids=(1, 2))
    group = make_group(
        [first, search_turn("x", ids=(3,)), "right"],
        [first, search_turn("x", ids=(3,)), "wrong"],
        [first, search_turn("x", ids=(4,)), "right"],
        [search_turn("Paris", ids=(1, 5)), "right"],
    )
    paths = [record["path"] for record in page_data(group.rollouts)["rollouts"]]
    assert paths[0][0] == paths[1][0] == paths[2][0] != paths[3][0]
    assert paths[0][1] == paths[1][1] != paths[2][1]
    assert paths[0][2] == paths[1][2]  # the builders' answers have the same ids
    assert paths[0][2] != paths[2][2] != paths[3][1]


def test_other_questions_never_share_a_path():
    records = page_data([make_rollout(question_id="q0"), make_rollout(question_id="q1")])["rollouts"]
    assert not set(records[0]["path"]) & set(records[1]["path"])
    assert [record["group"] for record in records] == [0, 1]


def test_exact_token_texts_travel_with_a_decoder_only():
    rollout = make_rollout([search_turn("Paris", advantages=[0.1, 0.2, 0.3]), "right"])
    assert "texts" not in page_data([rollout])["rollouts"][0]["turns"][0]["credit"]
    decoded = page_data([rollout], decode=lambda ids: "".join(f"<{token}>" for token in ids))
    assert decoded["rollouts"][0]["turns"][0]["credit"]["texts"] == ["<1>", "<2>", "<3>"]


def test_the_same_rollouts_give_the_same_page_and_parents_are_made(tmp_path):
    rollouts = [make_rollout(script, question_id=letter) for letter, script in TYPE_SCRIPTS.items()]
    first = write_html(tmp_path / "new" / "a.html", rollouts).read_bytes()
    assert first == write_html(tmp_path / "b.html", rollouts).read_bytes()


def test_lone_surrogates_do_not_keep_a_page_from_being_written(tmp_path):
    path = write_html(tmp_path / "a.html", [make_rollout([search_turn("x", query="\ud83d"), "right"])], title="\ud83d")
    assert embedded(path.read_text(encoding="utf-8"))["rollouts"][0]["turns"][0]["calls"][0]["query"] == "\ud83d"


@pytest.mark.parametrize("rollouts", [[], [make_rollout("miss", error="index gone")], [make_rollout([])]])
def test_odd_files_make_a_page_too(rollouts):
    assert len(embedded(render_html(rollouts))["rollouts"]) == len(rollouts)

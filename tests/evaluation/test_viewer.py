"""The viewer in a real browser. Every test reads what a person would see."""

import json
import time

import pytest

from grounded_rl.evaluation.html import write_html
from tests.builders import (
    TYPE_SCRIPTS,
    answer_turn,
    make_group,
    make_passage,
    make_rollout,
    malformed_turn,
    search_turn,
)

By = pytest.importorskip("selenium.webdriver.common.by", reason="needs `pip install selenium`").By
HOSTILE = "</script><script>window.owned=1</script><img src=x onerror=window.owned=2><b>bold</b>"


@pytest.fixture
def view(browser, tmp_path):
    """Opens a page of rollouts and returns a reader of it."""
    pages = []

    def open_page(rollouts, **options):
        path = write_html(tmp_path / f"page{len(pages)}.html", rollouts, **options)
        pages.append(path)
        browser.get(path.as_uri())
        return Page(browser)

    yield open_page
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert not severe, f"the page reported errors: {severe}"


class Page:
    def __init__(self, browser):
        self.browser = browser
        self.wait(lambda: browser.execute_script("return document.documentElement.dataset.ready === 'true'"))

    def wait(self, condition, seconds=10):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the page did not get there in time"
            time.sleep(0.02)

    def all(self, selector):
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector):
        # In one step: the list may redraw its rows between finding an element and reading it.
        script = "return Array.from(document.querySelectorAll(arguments[0]), (node) => node.innerText.trim())"
        return self.browser.execute_script(script, selector)

    def text(self, selector):
        return self.texts(selector)[0]

    def keys(self, text):
        self.browser.find_element(By.TAG_NAME, "body").send_keys(text)

    def click(self, selector):
        self.all(selector)[0].click()

    def style(self, selector, name):
        return self.all(selector)[0].value_of_css_property(name)


def one_of_each():
    return [
        make_rollout(script, question_id=f"q{letter}", question=f"Question {letter}?", question_kind=kind)
        for (letter, script), kind in zip(TYPE_SCRIPTS.items(), ["single", "multi", "single", "multi"], strict=True)
    ]


def test_a_rollout_is_shown_with_its_turns_marks_and_segments(view):
    page = view([make_rollout(["miss", malformed_turn(), "hit", "wrong"], question_kind="multi", rewards={"em": 0.0})])
    assert page.text("h2") == "What is the capital of France?"
    assert "evidence found, answer wrong" in page.text(".verdict")
    assert page.texts(".segment") == ["useful search", "residual search", "useful search", "answer"]
    assert page.texts("mark") == ["Paris"]
    assert page.texts(".passage.hit .evidence") == ["answer"]
    assert page.texts(".query q")[0] == "capital of France"
    assert page.text(".observation") == "The call could not be read."
    assert "rejected: invalid_json" in page.texts(".status")


def test_segments_have_different_colours(view):
    page = view([make_rollout("miss hit miss right")])
    colours = [
        page.browser.execute_script("return getComputedStyle(arguments[0], '::before').backgroundColor", card)
        for card in page.all(".turn")
    ]
    assert colours[0] == colours[1] == "rgb(0, 114, 178)"
    assert len(set(colours)) == 3


def test_filters_by_type_kind_and_text_narrow_the_list(view):
    page = view(one_of_each())
    assert page.text("#count") == "4 rollouts"
    page.click(".chip[data-type=A]")
    assert page.text("#count") == "3 of 4 rollouts"
    assert page.text("h2") == "Question B?"  # the selection moves to one that is still there
    page.click("#kind option[value=multi]")
    assert page.texts(".row-question") == ["Question B?", "Question D?"]
    page.all("#search")[0].send_keys("question d")
    page.wait(lambda: page.texts(".row-question") == ["Question D?"])
    page.all("#search")[0].send_keys(" nowhere")
    page.wait(lambda: page.texts(".empty") == ["No rollout matches these filters."])


def test_the_keyboard_reaches_everything(view):
    page = view(one_of_each())
    page.keys("j")
    assert page.text("h2") == "Question B?"
    page.keys("jjjjk")
    assert page.text("h2") == "Question C?"
    page.keys("3")
    assert page.all(".chip[data-type=C]")[0].get_attribute("aria-pressed") == "false"
    page.keys("3t")
    assert page.all("#tab-tree")[0].get_attribute("aria-selected") == "true"
    page.keys("t/")
    assert page.browser.switch_to.active_element.get_attribute("id") == "search"
    page.browser.switch_to.active_element.send_keys("jjj")
    assert page.all("#search")[0].get_attribute("value") == "jjj"
    page.browser.switch_to.active_element.send_keys("\ue00c")  # Escape
    page.keys("?")
    assert page.all("#help")[0].get_attribute("open") is not None


def test_the_theme_can_be_switched(view):
    page = view(one_of_each())
    before = page.style("body", "background-color")
    page.keys("d")
    after = page.style("body", "background-color")
    assert before != after
    page.keys("d")
    assert page.style("body", "background-color") == before


def test_token_credit_is_shaded_by_sign_and_size(view):
    turn = search_turn("Paris", text="aabbcc", advantages=[1.0, 0.0, -0.5])
    page = view([make_rollout([turn, "right"])])
    assert page.all(".token") == []
    page.keys("c")
    shades = [token.value_of_css_property("background-color") for token in page.all("#turn-0 .token")]
    assert page.texts("#turn-0 .token") == ["aa", "bb", "cc"]
    assert shades == ["rgba(0, 158, 115, 0.62)", "rgba(0, 0, 0, 0)", "rgba(213, 94, 0, 0.31)"]
    assert "advantage 1" in page.all("#turn-0 .token")[0].get_attribute("title")
    assert "approximate" in page.text(".legend")


def test_the_residual_view_takes_the_common_advantage_away(view):
    turn = search_turn("Paris", ids=(1, 2, 3), advantages=[-0.5, -0.5, -0.45])
    page = view([make_rollout([turn, "right"])], decode=lambda ids: "".join(f"<{token}>" for token in ids))
    page.keys("cc")
    classes = [token.get_attribute("class") for token in page.all("#turn-0 .token")]
    assert classes == ["token", "token", "token up"]
    assert page.texts("#turn-0 .token") == ["<1>", "<2>", "<3>"]
    assert "advantage minus -0.5" in page.text(".legend")


def test_a_rollout_without_credit_says_so(view):
    page = view([make_rollout("hit right")])
    page.keys("c")
    assert "never scored" in page.text(".legend")


def test_the_tree_joins_rollouts_where_their_tokens_agree(view):
    first = search_turn("Paris", ids=(1, 2), query="shared query")
    group = make_group(
        [first, search_turn("x", ids=(3,), query="left"), "right"],
        [first, search_turn("x", ids=(4,), query="right"), answer_turn("Lyon", ids=(9,))],
    )
    page = view([*group.rollouts, make_rollout("right", question_id="other")])
    page.keys("t")
    # the question, one shared search, two searches, two answers; the other question's rollout is not here
    assert len(page.all(".node")) == 6
    assert len(page.all(".edge")) == 5
    assert page.texts(".times") == ["×2", "×2"]
    assert page.texts(".ends .badge") == ["A", "B"]
    page.all(".node")[-1].click()
    assert page.all("#tab-rollout")[0].get_attribute("aria-selected") == "true"
    assert page.texts(".query q") == ["shared query", "right"]


def test_hostile_text_is_only_text(view):
    rollout = make_rollout(
        [
            search_turn(make_passage(HOSTILE, title=HOSTILE, passage_id=HOSTILE), query=HOSTILE, text=HOSTILE),
            malformed_turn(text=HOSTILE, error=HOSTILE),
            answer_turn(HOSTILE, advantages=[0.5, 0.1]),
        ],
        question_id=HOSTILE,
        question=HOSTILE,
        answers=[HOSTILE],
        answer=HOSTILE,
        question_kind=HOSTILE,
        rewards={HOSTILE: 1.0},
        extras={HOSTILE: HOSTILE},
    )
    page = view([rollout, make_rollout("right")], title=HOSTILE)
    for keys in ("", "c", "c", "t"):
        if keys:
            page.keys(keys)
        assert page.browser.execute_script("return window.owned") is None
        assert page.browser.execute_script("return document.querySelectorAll('img, b, body script').length") == 2
    page.keys("t")
    assert page.text("h2") == HOSTILE
    assert page.text("#title") == HOSTILE
    assert page.browser.title == HOSTILE
    assert page.texts(".gold") == [HOSTILE]


def test_five_thousand_rollouts_scroll_without_drawing_them_all(view):
    rollouts = [
        make_rollout(script, question_id=f"q{number}", question=f"Question {number}?", sample=number)
        for number, script in zip(range(5000), list(TYPE_SCRIPTS.values()) * 1250, strict=True)
    ]
    page = view(rollouts)
    assert page.text("#count") == "5,000 rollouts"
    assert len(page.all(".row")) < 60
    page.browser.execute_script("document.getElementById('list').scrollTop = 1e9")
    page.wait(lambda: "Question 4999?" in page.texts(".row-question"))
    assert len(page.all(".row")) < 60
    started = time.monotonic()
    page.all("#search")[0].send_keys("question 4321")
    page.wait(lambda: page.texts(".row-question") == ["Question 4321?"])
    assert time.monotonic() - started < 5


def test_a_very_long_text_is_cut_until_it_is_asked_for(view):
    long = "x" * 100_000 + " the end"
    page = view([make_rollout([search_turn(long, text=long), "right"])])
    assert "the end" not in page.text("#turn-0 .message")
    page.click("#turn-0 .message .more")
    assert page.text("#turn-0 .message").endswith("the end")
    assert page.browser.execute_script("return document.body.scrollWidth <= window.innerWidth")


def test_the_page_asks_nothing_of_the_network(view):
    page = view(one_of_each())
    page.keys("jct")
    urls = set()
    for entry in page.browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            urls.add(message["params"]["request"]["url"].split(":", 1)[0])
    # The browser's own start page is under chrome:.
    assert "file" in urls
    assert urls <= {"file", "data", "chrome"}


def test_the_address_leads_back_to_a_rollout(view):
    page = view(one_of_each())
    page.keys("jjt")
    address = page.browser.current_url
    assert address.endswith("#tree-2")
    page.browser.get("about:blank")
    page.browser.get(address)
    again = Page(page.browser)
    assert again.all("#tab-tree")[0].get_attribute("aria-selected") == "true"
    assert again.all(".row[aria-selected=true] .row-question")[0].text == "Question C?"


@pytest.mark.parametrize("rollouts", [[], [make_rollout([])], [make_rollout("miss", error="index gone")]])
def test_odd_files_open_without_an_error(view, rollouts):
    page = view(rollouts)
    page.keys("jktc")
    assert page.text("#count").startswith(str(len(rollouts)))

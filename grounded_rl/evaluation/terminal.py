"""
Rollouts in the terminal.

Everything a policy or a corpus wrote is shown as literal text: no markup is interpreted and no control character
reaches the terminal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD, Box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from grounded_rl.evaluation.markdown import format_value
from grounded_rl.evaluation.marking import Decode, Span, passage_spans, printable, token_texts
from grounded_rl.evaluation.metrics import METRIC_LABELS, compute_metrics, metrics_by_kind
from grounded_rl.evaluation.palette import SEGMENT_COLORS, SEGMENT_LABELS, TYPE_COLORS, TYPE_MEANINGS
from grounded_rl.grounding import Diagnosis, diagnose, segments
from grounded_rl.rollouts import Call, CallStatus, Rollout, ShownPassage, StopReason, Turn, TurnKind

MARK_STYLE = "bold black on bright_yellow"
SUMMARY_METRICS = ("em", "f1", "tool_hit", "sup_cor", "hit_acc", "grounded_share", "hit_but_wrong")
SUMMARY_REST = ("answered_share", "malformed_share", "truncated_share", "num_searches", "num_turns")

_LEFT_BAR = Box("    \n┃   \n    \n┃   \n    \n    \n┃   \n    \n")
_CHARACTERS_PER_LINE = 25
"""A text of many short lines is cut by its lines: one per so many characters allowed."""

_SHADES = 6
_POSITIVE, _NEGATIVE = (0, 158, 115), (213, 94, 0)


def clip(text: str, max_characters: int) -> str:
    """Head of a text that is too long for a screen, with the number of characters left out."""
    max_lines = max(1, max_characters // _CHARACTERS_PER_LINE)
    head = "\n".join(text.split("\n", max_lines)[:max_lines])[:max_characters]
    left_out = len(text) - len(head)
    return f"{head}… (+{left_out:,} characters)" if left_out else text


def _marked(text: str, spans: Sequence[Span], max_characters: int, style: str = "") -> Text:
    """Text with its spans marked, clipped so that the first span stays in view."""
    start = 0
    if spans and spans[0][1] > max_characters:
        start = max(0, spans[0][0] - max_characters // 2)
    shown = clip(text[start:], max_characters)
    prefix = "… " if start else ""
    # `printable` replaces characters one by one, so the offsets stay valid.
    result = Text(prefix + printable(shown), style=style)
    for left, right in spans:
        result.stylize(MARK_STYLE, max(left - start, 0) + len(prefix), max(right - start, 0) + len(prefix))
    return result


def _shade(strength: float) -> str:
    """Background for a value in [-1, 1]: green above zero, red below, stronger further away. Text on it is black."""
    level = round(abs(strength) * _SHADES)
    if not level:
        return ""
    target = _POSITIVE if strength > 0 else _NEGATIVE
    mixed = (round(255 + (channel - 255) * level / _SHADES) for channel in target)
    return "black on #" + "".join(f"{channel:02x}" for channel in mixed)


def common_advantage(rollout: Rollout) -> float:
    """
    What the tokens of a rollout got before any token-level credit.

    Training records it; for rollouts without the record it is the most common advantage, which is a guess: a residual
    that reached its bound at many tokens can be more common.
    """
    recorded = rollout.extras.get("advantage")
    if isinstance(recorded, float):
        return recorded
    values = Counter(value for turn in rollout.turns for value in turn.advantages or ())
    return values.most_common(1)[0][0] if values else 0.0


def _credit_text(turn: Turn, decode: Decode | None, base: float, scale: float, max_characters: int) -> Text:
    texts, _ = token_texts(turn, decode)
    result = Text()
    for text, value in zip(texts, turn.advantages or (), strict=True):
        result.append(printable(text), style=_shade((value - base) / scale if scale else 0.0))
        if len(result) > max_characters:
            result.append("…")
            break
    return result


def _passage(passage: ShownPassage, rollout: Rollout, max_characters: int) -> Text:
    in_title, in_text = passage_spans(passage, rollout.answers)
    line = Text("● " if in_title or in_text else "○ ", style="green" if in_title or in_text else "dim")
    line.append_text(_marked(passage.title, in_title, 200, style="bold"))
    line.append(f"  [{printable(clip(passage.id, 60))}]", style="dim")
    if passage.score is not None:
        line.append(f" {passage.score:.3f}", style="dim")
    if passage.num_tokens is not None and passage.num_tokens != passage.num_tokens_full is not None:
        line.append(f" cut to {passage.num_tokens} of {passage.num_tokens_full} tokens", style="dim italic")
    line.append("\n")
    line.append_text(_marked(passage.text, in_text, max_characters))
    return line


def _call(call: Call, rollout: Rollout, max_characters: int) -> list[RenderableType]:
    line = Text("⌕ ", style="bold cyan")
    line.append(printable(clip(call.query, 300)) if call.query is not None else "(no query)", style="bold cyan")
    if call.status is not CallStatus.OK:
        detail = f": {call.error}" if call.error else ""
        line.append(f"  {call.status.value.replace('_', ' ')}{printable(detail)}", style="yellow")
    if call.cached:
        line.append("  from the cache", style="dim")
    passages = (_passage(passage, rollout, max_characters) for passage in call.passages)
    return [line, *(Padding(passage, (0, 0, 0, 2)) for passage in passages)]


def _turn(turn: Turn, title: Text, body: Text, rollout: Rollout, color: str, max_characters: int) -> Panel:
    parts: list[RenderableType] = [body]
    for call in turn.calls:
        parts += _call(call, rollout, max_characters)
    if turn.kind is TurnKind.MALFORMED and turn.observation:
        parts.append(Text(printable(clip(turn.observation, max_characters)), style="yellow"))
    return Panel(Group(*parts), box=_LEFT_BAR, border_style=color, title=title, title_align="left", padding=(0, 1))


def _header(rollout: Rollout, diagnosis: Diagnosis) -> Table:
    letter = str(diagnosis.type)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    grid.add_row("question", Text(printable(clip(rollout.question, 1000)), style="bold"))
    grid.add_row("gold", Text(printable(clip(" | ".join(rollout.answers), 500))))
    answer = Text("(none)", style="yellow") if rollout.answer is None else Text(printable(clip(rollout.answer, 500)))
    answer.append(
        "  ✓ exact match" if diagnosis.correct else "  ✗ no match", style="green" if diagnosis.correct else "red"
    )
    grid.add_row("answer", answer)
    grid.add_row("type", Text(f"{letter}  {TYPE_MEANINGS[letter]}", style=TYPE_COLORS[letter]))
    facts = [f"stopped by {rollout.stop.value.replace('_', ' ')}", f"{rollout.num_sampled_tokens:,} sampled tokens"]
    facts += [f"{name} {'–' if value is None else f'{value:.3g}'}" for name, value in rollout.rewards.items()]
    grid.add_row("", Text(printable(" · ".join(facts)), style="dim"))
    if rollout.error is not None:
        grid.add_row("error", Text(printable(clip(rollout.error, 1000)), style="red"))
    return grid


def render_rollout(
    rollout: Rollout,
    *,
    credit: bool = False,
    residual: bool = False,
    decode: Decode | None = None,
    max_characters: int = 1500,
) -> Group:
    """
    One rollout for a terminal.

    Args:
        rollout (`Rollout`):
            What to show.
        credit (`bool`, *optional*, defaults to `False`):
            Shade every sampled token by its advantage.
        residual (`bool`, *optional*, defaults to `False`):
            Shade by the difference to the rollout's most common advantage instead: what a token-level method added.
        decode (`Callable[[Sequence[int]], str]`, *optional*):
            Decoder of the policy's tokenizer. Without it token borders are approximate.
        max_characters (`int`, *optional*, defaults to `1500`):
            Longest text of one turn or passage.

    Returns:
        `rich.console.Group`: Print it with a `rich.console.Console`.
    """
    diagnosis = diagnose(rollout)
    heading = f"{rollout.question_id} · sample {rollout.sample}"
    if rollout.question_kind:
        heading += f" · {rollout.question_kind}"
    parts: list[RenderableType] = [
        Rule(Text(printable(clip(heading, 200)), style="bold"), style="dim", align="left"),
        _header(rollout, diagnosis),
    ]
    base = common_advantage(rollout) if residual else 0.0
    values = [value - base for turn in rollout.turns for value in turn.advantages or ()]
    scale = max(map(abs, values), default=0.0)
    for number, (turn, segment) in enumerate(zip(rollout.turns, segments(rollout, diagnosis), strict=True), start=1):
        name = str(segment)
        title = Text(f"turn {number} · {SEGMENT_LABELS[name]}", style=f"bold {SEGMENT_COLORS[name]}")
        title.append(f" · {len(turn.ids)} tokens", style="dim")
        if (credit or residual) and turn.advantages is not None:
            low, high = min(turn.advantages), max(turn.advantages)
            title.append(f" · advantage {low:+.4f}" + (f" … {high:+.4f}" if low != high else ""), style="dim")
            body = _credit_text(turn, decode, base, scale, max_characters)
        else:
            body = Text(printable(clip(turn.text, max_characters)))
        parts.append(_turn(turn, title, body, rollout, SEGMENT_COLORS[name], max_characters))
    if credit or residual:
        parts.append(_credit_note(rollout, base, scale, residual=residual, exact=decode is not None))
    return Group(*parts)


def _credit_note(rollout: Rollout, base: float, scale: float, *, residual: bool, exact: bool) -> Text:
    if all(turn.advantages is None for turn in rollout.turns):
        return Text("This rollout was never scored: it has no token advantages.", style="dim")
    quantity = f"advantage minus {base:+.4f}" if residual else "advantage"
    note = Text("shading: ", style="dim")
    for step in (-1.0, -0.5, 0.5, 1.0):
        note.append(f" {step * scale:+.4f} ", style=_shade(step))
    note.append(f" {quantity}" + ("" if exact else "; token borders are approximate without a tokenizer"))
    return note


def type_bar(metrics: dict[str, float], width: int = 48) -> Text:
    """Shares of the types as one coloured bar with its legend; empty where there is nothing to share."""
    bar = Text()
    shares = {letter: metrics[f"type_{letter.lower()}"] for letter in TYPE_COLORS}
    if any(share != share for share in shares.values()):
        return bar
    position = 0.0
    for letter, share in shares.items():
        start, position = round(position * width), position + share
        bar.append("█" * (round(position * width) - start), style=TYPE_COLORS[letter])
    for letter, share in shares.items():
        bar.append(f"  {letter}", style=f"bold {TYPE_COLORS[letter]}")
        bar.append(f" {100 * share:.0f} %")
    return bar


def render_summary(rollouts: Sequence[Rollout], *, title: str = "Rollouts") -> Group:
    """
    Metrics of a set of rollouts, over all questions and by kind.

    Args:
        rollouts (`Sequence[Rollout]`):
            What to summarise.
        title (`str`, *optional*, defaults to `"Rollouts"`):
            Heading.

    Returns:
        `rich.console.Group`: A bar of the type shares and a table with one column per kind of question.
    """
    columns = {"all": compute_metrics(rollouts)}
    by_kind = metrics_by_kind(rollouts)
    if len(by_kind) > 1:
        columns |= by_kind
    table = Table(box=SIMPLE_HEAD, header_style="bold")
    table.add_column("metric")
    for name in columns:
        table.add_column(Text(printable(clip(name, 40))), justify="right")
    for label, count in (("questions", "num_questions"), ("rollouts", "num_rollouts"), ("failed", "num_failed")):
        table.add_row(label, *(f"{metrics[count]:,.0f}" for metrics in columns.values()), style="dim")
    for name in SUMMARY_METRICS:
        table.add_row(METRIC_LABELS[name], *(format_value(name, metrics[name]) for metrics in columns.values()))
    for letter in TYPE_COLORS:
        name = f"type_{letter.lower()}"
        cells = (format_value(name, metrics[name]) for metrics in columns.values())
        table.add_row(Text(METRIC_LABELS[name], style=TYPE_COLORS[letter]), *cells)
    for name in SUMMARY_REST:
        table.add_row(METRIC_LABELS[name], *(format_value(name, metrics[name]) for metrics in columns.values()))
    return Group(
        Rule(Text(printable(title), style="bold"), style="dim", align="left"), type_bar(columns["all"]), table
    )


def example_of_each_type(rollouts: Iterable[Rollout]) -> list[Rollout]:
    """The first rollout of every diagnosis type that occurs, A to D; failed rollouts are passed over."""
    found: dict[str, Rollout] = {}
    for rollout in rollouts:
        if len(found) == len(TYPE_COLORS):
            break
        if rollout.stop is not StopReason.FAILED:
            found.setdefault(str(diagnose(rollout).type), rollout)
    return [found[letter] for letter in TYPE_COLORS if letter in found]


def render_examples(rollouts: Iterable[Rollout], *, max_characters: int = 400) -> Group:
    """
    One rollout of each type.

    Args:
        rollouts (`Iterable[Rollout]`):
            Where to look; the first of each type is shown.
        max_characters (`int`, *optional*, defaults to `400`):
            Longest text of one turn or passage.

    Returns:
        `rich.console.Group`: Up to four rollouts.
    """
    examples = example_of_each_type(rollouts)
    return Group(*(render_rollout(rollout, max_characters=max_characters) for rollout in examples))

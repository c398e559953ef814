// One rollout: its turns, what was searched and shown, where the answer stood, and the credit of every token.

const CREDIT_MODES = { off: "Credit off", advantage: "Advantage", residual: "Residual" };
const TAGS = /(<\/?(?:think|tool_call|tool_response|answer|search|result|information)>|<\|[a-z_]+\|>)/g;
let creditMode = "off";

// A message with its tags dimmed and the text between them styled by the innermost one that is open.
function message(node, text) {
  let inside = "";
  for (const part of text.split(TAGS)) {
    if (!part) continue;
    const tag = part.match(/^<(\/?)([a-z_]+)>$/);
    if (tag) {
      node.append(el("span", "tag", part));
      inside = tag[1] ? "" : tag[2];
    } else if (/^<\|[a-z_]+\|>$/.test(part)) {
      node.append(el("span", "tag", part));
    } else {
      node.append(inside ? el("span", `in-${inside}`, part) : part);
    }
  }
}

function creditScale(rollout) {
  const values = rollout.turns.flatMap((turn) => (turn.credit ? turn.credit.values : [])).filter((v) => v !== null);
  const base = creditMode === "residual" ? rollout.base : 0;
  const largest = values.reduce((most, value) => Math.max(most, Math.abs(value - base)), 0);
  return { base, largest };
}

function tokenTexts(turn) {
  if (turn.credit.texts) return turn.credit.texts;
  const characters = Array.from(turn.text);
  const count = turn.credit.values.length;
  const edge = (token) => Math.floor((token * characters.length) / count);
  return turn.credit.values.map((_, token) => characters.slice(edge(token), edge(token + 1)).join(""));
}

function creditText(node, turn, scale) {
  const texts = tokenTexts(turn);
  turn.credit.values.forEach((value, token) => {
    const span = el("span", "token", texts[token]);
    const strength = value === null || !scale.largest ? 0 : (value - scale.base) / scale.largest;
    span.style.setProperty("--strength", Math.abs(strength).toFixed(3));
    if (strength) span.classList.add(strength > 0 ? "up" : "down");
    const logp = turn.credit.logps ? ` · log-probability ${number(turn.credit.logps[token], 4)}` : "";
    span.title = `token ${token + 1} · advantage ${number(value, 5)}${logp}`;
    node.append(span);
  });
}

function legend(rollout, scale) {
  const swatch = (strength, label) => {
    const node = el("span", `token ${strength > 0 ? "up" : "down"}`, ` ${label} `);
    node.style.setProperty("--strength", String(Math.abs(strength)));
    return node;
  };
  const quantity = creditMode === "residual" ? `advantage minus ${number(scale.base, 4)}` : "advantage";
  const exact = rollout.turns.every((turn) => !turn.credit || turn.credit.texts);
  return el("p", "legend", swatch(-1, `−${number(scale.largest, 3)}`), swatch(-0.5, " "), swatch(0.5, " "),
    swatch(1, `+${number(scale.largest, 3)}`),
    ` ${quantity}${exact ? "" : "; token borders are approximate, the page was written without a tokenizer"}`);
}

function passage(entry) {
  const [id, title, text] = DATA.passages[entry.passage];
  const hit = entry.titleSpans.length + entry.textSpans.length > 0;
  const heading = el("h4", "", marked(el("span", ""), title, entry.titleSpans));
  const facts = [id, entry.score === null ? null : number(entry.score, 4),
    entry.cut ? `cut to ${entry.cut[0]} of ${entry.cut[1]} tokens` : null];
  heading.append(el("small", "", facts.filter(Boolean).join(" · ")));
  if (hit) heading.append(el("span", "evidence", "answer"));
  const body = longText(el("div", "passage-text"), text, (node, part) => {
    marked(node, part, entry.textSpans.filter(([, end]) => end <= part.length));
  });
  const node = el("article", hit ? "passage hit" : "passage", heading, body);
  // A clamp that hides the answer would defeat the mark.
  const late = entry.textSpans.length && entry.textSpans[0][1] > 350;
  if (text.length > 420 && !late) {
    body.classList.add("clamped");
    const toggle = button("more", "more", () => {
      const clamped = body.classList.toggle("clamped");
      toggle.textContent = clamped ? "more" : "less";
    });
    node.append(toggle);
  }
  return node;
}

function call(entry) {
  const head = el("div", "query", el("span", "lens", "⌕"), el("q", "", entry.query === null ? "no query" : entry.query.slice(0, 2000)));
  if (entry.status !== "ok") {
    head.append(el("span", "status", entry.status.replace("_", " ") + (entry.error ? `: ${entry.error}` : "")));
  }
  if (entry.cached) head.append(el("span", "status quiet", "from the cache"));
  return el("div", "call", head, ...entry.passages.map(passage));
}

function turnCard(rollout, turn, position, scale) {
  const label = el("span", "segment", DATA.segments[turn.segment]);
  const facts = [`${turn.tokens.toLocaleString("en")} tokens`, turn.finish === "length" ? "cut off" : null];
  const credited = turn.credit && creditMode !== "off";
  if (credited) {
    const values = turn.credit.values.filter((value) => value !== null);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    if (values.length) facts.push(`advantage ${number(low, 4)}${low === high ? "" : ` … ${number(high, 4)}`}`);
  }
  const head = el("h3", "", `Turn ${position + 1}`, label, el("small", "", facts.filter(Boolean).join(" · ")));
  const text = el("div", "message");
  if (credited) creditText(text, turn, scale);
  else longText(text, turn.text, message);
  const card = el("section", `turn ${turn.segment}`, head, text, ...turn.calls.map(call));
  if (turn.observation) card.append(longText(el("div", "observation"), turn.observation, (node, part) => node.append(part)));
  card.id = `turn-${position}`;
  return card;
}

function definition(list, name, ...values) {
  list.append(el("dt", "", name), el("dd", "", ...values));
}

function rolloutHeader(rollout) {
  const facts = el("dl", "facts");
  definition(facts, "Gold", ...rollout.gold.map((answer) => el("span", "gold", answer)));
  definition(facts, "Answer", rollout.answer === null ? el("em", "", "none") : el("span", "", rollout.answer.slice(0, 2000)),
    el("span", rollout.correct ? "right" : "wrong", rollout.correct ? " ✓ exact match" : " ✗ no match"));
  const rewards = Object.entries(rollout.rewards).map(([name, value]) => `${name} ${number(value)}`);
  definition(facts, "Stopped", `${DATA.stops[rollout.stop]} · ${rollout.tokens.toLocaleString("en")} sampled tokens`);
  if (rewards.length) definition(facts, "Rewards", rewards.join(" · "));
  if (rollout.error !== null) definition(facts, "Error", el("span", "wrong", rollout.error.slice(0, 4000)));
  if (rollout.extras) definition(facts, "Extras", el("code", "", rollout.extras));
  const id = [rollout.id, `sample ${rollout.sample}`, rollout.kind].filter(Boolean).join(" · ");
  const siblings = ROLLOUTS.reduce((count, other) => count + (other.group === rollout.group), 0);
  const tree = button(siblings > 1 ? `${siblings} rollouts of this question` : "tree", "link", () => show("tree"));
  return el("header", "card", el("p", "path", id, tree), longText(el("h2", ""), rollout.question, (node, part) => node.append(part)),
    el("p", "verdict", typeBadge(rollout.type), DATA.types[rollout.type]), facts);
}

function drawRollout(view) {
  const rollout = ROLLOUTS[selected];
  const scale = creditScale(rollout);
  const parts = [rolloutHeader(rollout)];
  if (creditMode !== "off") {
    const scored = rollout.turns.some((turn) => turn.credit);
    parts.push(scored ? legend(rollout, scale) : el("p", "legend", "This rollout was never scored: it has no token advantages."));
  }
  rollout.turns.forEach((turn, position) => parts.push(turnCard(rollout, turn, position, scale)));
  view.replaceChildren(...parts);
}

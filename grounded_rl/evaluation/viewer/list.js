// The list of rollouts: filters, and rows drawn only where they can be seen.

const ROW_HEIGHT = 74;
const OVERSCAN = 6;

const filters = { text: "", types: new Set(Object.keys(DATA.types)), kind: "", stop: "", order: "file" };
const haystacks = new Array(ROLLOUTS.length);
let shown = ROLLOUTS.map((_, index) => index);
let selected = 0;

function haystack(index) {
  if (haystacks[index] === undefined) {
    const rollout = ROLLOUTS[index];
    const queries = rollout.turns.flatMap((turn) => turn.calls.map((call) => call.query || ""));
    const parts = [rollout.id, rollout.question, rollout.answer || "", ...rollout.gold, ...queries];
    haystacks[index] = parts.join("\n").toLowerCase();
  }
  return haystacks[index];
}

function matches(index, words) {
  const rollout = ROLLOUTS[index];
  return (
    filters.types.has(rollout.type) &&
    (!filters.kind || rollout.kind === filters.kind) &&
    (!filters.stop || rollout.stop === filters.stop) &&
    words.every((word) => haystack(index).includes(word))
  );
}

const ORDERS = {
  file: (a, b) => a - b,
  question: (a, b) => ROLLOUTS[a].group - ROLLOUTS[b].group || a - b,
  long: (a, b) => ROLLOUTS[b].tokens - ROLLOUTS[a].tokens || a - b,
};

function applyFilters() {
  const words = filters.text.toLowerCase().split(/\s+/).filter(Boolean);
  shown = ROLLOUTS.map((_, index) => index).filter((index) => matches(index, words));
  shown.sort(ORDERS[filters.order]);
  const all = ROLLOUTS.length.toLocaleString("en");
  const some = shown.length.toLocaleString("en");
  byId("count").textContent = shown.length === ROLLOUTS.length ? `${all} rollouts` : `${some} of ${all} rollouts`;
  byId("rows").style.height = `${shown.length * ROW_HEIGHT}px`;
  if (shown.length && !shown.includes(selected)) select(shown[0]);
  reveal();
  drawRows();
}

function row(position) {
  const index = shown[position];
  const rollout = ROLLOUTS[index];
  const answer = el("span", rollout.correct ? "right" : "wrong", rollout.correct ? "✓ " : "✗ ");
  answer.append((rollout.answer === null ? "no answer" : rollout.answer).slice(0, 80));
  const facts = [rollout.kind, `sample ${rollout.sample}`, rollout.stop === "answer" ? null : DATA.stops[rollout.stop]];
  const node = el(
    "div",
    "row",
    typeBadge(rollout.type),
    el("div", "row-text", el("div", "row-question", rollout.question.slice(0, 200)),
      el("div", "row-facts", answer, el("span", "", facts.filter(Boolean).join(" · ").slice(0, 120)))),
  );
  node.setAttribute("role", "option");
  node.setAttribute("aria-selected", String(index === selected));
  node.setAttribute("aria-setsize", String(shown.length));
  node.setAttribute("aria-posinset", String(position + 1));
  node.id = `row-${index}`;
  node.dataset.index = String(index);
  node.style.top = `${position * ROW_HEIGHT}px`;
  node.addEventListener("click", () => select(index));
  return node;
}

function drawRows() {
  const list = byId("list");
  const first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - OVERSCAN);
  const last = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW_HEIGHT) + OVERSCAN);
  const rows = [];
  for (let position = first; position < last; position += 1) rows.push(row(position));
  if (!shown.length) rows.push(el("p", "empty", "No rollout matches these filters."));
  byId("rows").replaceChildren(...rows);
  if (shown.includes(selected)) list.setAttribute("aria-activedescendant", `row-${selected}`);
  else list.removeAttribute("aria-activedescendant");
}

// Scrolls the selected row into the list, by the least amount.
function reveal() {
  const list = byId("list");
  const top = shown.indexOf(selected) * ROW_HEIGHT;
  if (top < 0) return;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW_HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_HEIGHT - list.clientHeight;
}

function move(step) {
  if (!shown.length) return;
  const position = shown.indexOf(selected);
  const next = position < 0 ? 0 : Math.min(shown.length - 1, Math.max(0, position + step));
  select(shown[next]);
}

function fillSelect(id, label, values, names) {
  const first = el("option", "", label);
  first.value = "";
  const options = values.map((value) => {
    const option = el("option", "", names ? names[value] : value);
    option.value = value;
    return option;
  });
  byId(id).replaceChildren(first, ...options);
  byId(id).addEventListener("change", (event) => {
    filters[id] = event.target.value;
    applyFilters();
  });
}

function toggleType(type) {
  if (filters.types.has(type)) filters.types.delete(type);
  else filters.types.add(type);
  drawTypes();
  applyFilters();
}

function drawTypes() {
  const counts = {};
  for (const rollout of ROLLOUTS) counts[rollout.type] = (counts[rollout.type] || 0) + 1;
  const chips = Object.keys(DATA.types).map((type) => {
    const chip = button("", "chip", () => toggleType(type));
    chip.append(typeBadge(type), (counts[type] || 0).toLocaleString("en"));
    chip.title = DATA.types[type];
    chip.setAttribute("aria-pressed", String(filters.types.has(type)));
    chip.dataset.type = type;
    return chip;
  });
  const focused = document.activeElement && document.activeElement.dataset.type;
  byId("types").replaceChildren(...chips);
  const again = chips.find((chip) => chip.dataset.type === focused);
  if (again) again.focus();
}

function startList() {
  const kinds = [...new Set(ROLLOUTS.map((rollout) => rollout.kind).filter(Boolean))].sort();
  const stops = Object.keys(DATA.stops).filter((stop) => ROLLOUTS.some((rollout) => rollout.stop === stop));
  fillSelect("kind", "All kinds", kinds);
  fillSelect("stop", "All stops", stops, DATA.stops);
  byId("order").addEventListener("change", (event) => {
    filters.order = event.target.value;
    applyFilters();
  });
  let timer = 0;
  byId("search").addEventListener("input", (event) => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      filters.text = event.target.value;
      applyFilters();
    }, 80);
  });
  byId("list").addEventListener("scroll", drawRows, { passive: true });
  window.addEventListener("resize", drawRows);
  drawTypes();
  applyFilters();
}

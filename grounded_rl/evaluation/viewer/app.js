// State of the page, keyboard, address.

let mode = "rollout";

function show(next) {
  mode = next;
  const view = byId("view");
  if (!ROLLOUTS.length) {
    view.replaceChildren(el("p", "empty", "This file has no rollouts."));
    return;
  }
  for (const name of ["rollout", "tree"]) byId(`tab-${name}`).setAttribute("aria-selected", String(name === mode));
  byId("credit").hidden = mode !== "rollout";
  if (mode === "tree") drawTree(view);
  else drawRollout(view);
  history.replaceState(null, "", `#${mode}-${selected}`);
}

function select(index) {
  const changed = index !== selected;
  selected = index;
  reveal();
  drawRows();
  show(mode);
  if (changed) byId("view").scrollTop = 0;
}

function setCredit(next) {
  creditMode = next;
  drawCredit();
  show("rollout");
}

function drawCredit() {
  const buttons = Object.entries(CREDIT_MODES).map(([name, label]) => {
    const node = button(label, "", () => setCredit(name));
    node.setAttribute("aria-pressed", String(name === creditMode));
    node.dataset.credit = name;
    return node;
  });
  byId("credit").replaceChildren(...buttons);
}

// Storage can be denied to a page opened from a file; the choice then lasts as long as the page.
function storedTheme(value) {
  try {
    if (value) localStorage.setItem("grounded-rl-theme", value);
    return localStorage.getItem("grounded-rl-theme");
  } catch {
    return null;
  }
}

function toggleTheme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  storedTheme(document.documentElement.dataset.theme);
}

const KEYS = {
  j: () => move(1),
  k: () => move(-1),
  ArrowDown: () => move(1),
  ArrowUp: () => move(-1),
  "/": () => byId("search").focus(),
  t: () => show(mode === "tree" ? "rollout" : "tree"),
  c: () => {
    const names = Object.keys(CREDIT_MODES);
    setCredit(names[(names.indexOf(creditMode) + 1) % names.length]);
  },
  d: toggleTheme,
  "?": () => byId("help").showModal(),
};
Object.keys(DATA.types).forEach((type, position) => {
  KEYS[String(position + 1)] = () => toggleType(type);
});

document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select, textarea");
  if (event.key === "Escape" && typing) event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const arrow = event.key.startsWith("Arrow");
  // Arrows scroll the reader as usual; they move the selection only in the list.
  if (arrow && document.activeElement !== byId("list")) return;
  const action = KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});

function start() {
  const theme = storedTheme();
  if (theme) document.documentElement.dataset.theme = theme;
  byId("theme").addEventListener("click", toggleTheme);
  byId("help-button").addEventListener("click", () => byId("help").showModal());
  byId("tab-rollout").addEventListener("click", () => show("rollout"));
  byId("tab-tree").addEventListener("click", () => show("tree"));
  byId("previous").addEventListener("click", () => move(-1));
  byId("next").addEventListener("click", () => move(1));
  for (const [label, value] of DATA.metrics) byId("metrics").append(el("div", "", el("dt", "", label), el("dd", "", percent(value))));
  const address = location.hash.match(/^#(rollout|tree)-(\d+)$/);
  if (address && Number(address[2]) < ROLLOUTS.length) {
    mode = address[1];
    selected = Number(address[2]);
  }
  drawCredit();
  startList();
  show(mode);
  document.documentElement.dataset.ready = "true";
}

start();

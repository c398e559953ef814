// Elements are built with textContent only: what a policy or a corpus wrote is never parsed as markup.

const DATA = JSON.parse(document.getElementById("data").textContent);
const ROLLOUTS = DATA.rollouts;
const LONG_TEXT = 20000;

const byId = (id) => document.getElementById(id);

function el(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  for (const child of children) {
    if (child !== null && child !== undefined) node.append(child);
  }
  return node;
}

function button(label, className, action) {
  const node = el("button", className, label);
  node.type = "button";
  node.addEventListener("click", action);
  return node;
}

function typeBadge(type) {
  const node = el("span", `badge type-${type}`, type);
  node.title = DATA.types[type];
  return node;
}

function number(value, digits = 3) {
  return value === null || value === undefined ? "–" : String(Number(value.toPrecision(digits)));
}

function percent(value) {
  return value === null ? "–" : `${(100 * value).toFixed(1)} %`;
}

// Text with [start, end) ranges wrapped in <mark>.
function marked(parent, text, spans) {
  let position = 0;
  for (const [start, end] of spans) {
    parent.append(text.slice(position, start), el("mark", "", text.slice(start, end)));
    position = end;
  }
  parent.append(text.slice(position));
  return parent;
}

// Runs `fill(node, text)` on the head of a very long text, and on all of it on demand.
function longText(node, text, fill) {
  if (text.length <= LONG_TEXT) {
    fill(node, text);
    return node;
  }
  fill(node, text.slice(0, LONG_TEXT));
  const more = button(`Show all ${text.length.toLocaleString("en")} characters`, "more", () => {
    node.replaceChildren();
    fill(node, text);
  });
  node.append("… ", more);
  return node;
}

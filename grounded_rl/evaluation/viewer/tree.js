// The rollouts of one question as a tree: rollouts share a node as long as their turns are token for token the same.

const NODE_WIDTH = 236;
const NODE_HEIGHT = 84;
const COLUMN_GAP = 56;
const ROW_GAP = 14;
const SVG = "http://www.w3.org/2000/svg";

function buildTree(group) {
  const root = { depth: 0, children: [], members: [], turn: null };
  const nodes = new Map();
  ROLLOUTS.forEach((rollout, index) => {
    if (rollout.group !== group) return;
    root.members.push(index);
    let parent = root;
    rollout.path.forEach((key, position) => {
      let node = nodes.get(key);
      if (!node) {
        node = { depth: position + 1, children: [], members: [], turn: rollout.turns[position], position, ends: [] };
        nodes.set(key, node);
        parent.children.push(node);
      }
      node.members.push(index);
      if (position === rollout.path.length - 1) node.ends.push(index);
      parent = node;
    });
  });
  return root;
}

// Leaves take one row each; a parent stands in the middle of its children.
function placeTree(root) {
  let leaves = 0;
  let depth = 0;
  const place = (node) => {
    depth = Math.max(depth, node.depth);
    if (!node.children.length) {
      node.y = leaves * (NODE_HEIGHT + ROW_GAP);
      leaves += 1;
    } else {
      node.children.forEach(place);
      node.y = (node.children[0].y + node.children[node.children.length - 1].y) / 2;
    }
    node.x = node.depth * (NODE_WIDTH + COLUMN_GAP);
  };
  place(root);
  return {
    width: (depth + 1) * (NODE_WIDTH + COLUMN_GAP) - COLUMN_GAP,
    height: Math.max(1, leaves) * (NODE_HEIGHT + ROW_GAP) - ROW_GAP,
  };
}

function edge(parent, child, onPath) {
  const path = document.createElementNS(SVG, "path");
  const [x1, y1] = [parent.x + NODE_WIDTH, parent.y + NODE_HEIGHT / 2];
  const [x2, y2] = [child.x, child.y + NODE_HEIGHT / 2];
  const middle = (x1 + x2) / 2;
  path.setAttribute("d", `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}`);
  path.setAttribute("class", onPath ? "edge on-path" : "edge");
  return path;
}

function nodeSummary(node) {
  if (!node.turn) return ["question", ROLLOUTS[node.members[0]].question, "root"];
  if (node.turn.kind === "search") {
    const found = node.turn.calls.some((entry) => entry.passages.some((p) => p.titleSpans.length + p.textSpans.length));
    const queries = node.turn.calls.map((entry) => entry.query || "").join(" / ");
    return [found ? "search, answer shown" : "search", queries, found ? "found" : "missed"];
  }
  const rollout = ROLLOUTS[node.members[0]];
  if (node.turn.kind === "answer") return ["answer", rollout.answer === null ? node.turn.text : rollout.answer, "final"];
  return [node.turn.kind, node.turn.text, "broken"];
}

function treeNode(node) {
  const [title, text, style] = nodeSummary(node);
  const head = el("div", "node-head", title);
  if (node.members.length > 1) head.append(el("span", "times", `×${node.members.length}`));
  const types = node.ends ? node.ends.map((index) => ROLLOUTS[index].type) : [];
  if (types.length) head.append(el("span", "ends", ...[...new Set(types)].sort().map(typeBadge)));
  const card = button("", `node ${style}`, () => {
    const target = node.members.includes(selected) ? selected : node.members[0];
    select(target);
    show("rollout");
    const turn = node.turn && byId(`turn-${node.position}`);
    if (turn) turn.scrollIntoView({ block: "start" });
  });
  card.append(head, el("div", "node-text", text.slice(0, 240)));
  card.style.left = `${node.x}px`;
  card.style.top = `${node.y}px`;
  if (node.members.includes(selected)) card.classList.add("on-path");
  return card;
}

function drawTree(view) {
  const rollout = ROLLOUTS[selected];
  const root = buildTree(rollout.group);
  const size = placeTree(root);
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("width", String(size.width));
  svg.setAttribute("height", String(size.height));
  svg.setAttribute("aria-hidden", "true");
  const canvas = el("div", "canvas", svg);
  canvas.style.width = `${size.width}px`;
  canvas.style.height = `${size.height}px`;
  const visit = (node) => {
    canvas.append(treeNode(node));
    for (const child of node.children) {
      svg.append(edge(node, child, child.members.includes(selected)));
      visit(child);
    }
  };
  visit(root);
  const count = root.members.length;
  const note = el("p", "legend",
    `${count} ${count === 1 ? "rollout" : "rollouts"} of one question. A node is a turn; rollouts share it while their tokens are the same.`);
  view.replaceChildren(note, el("div", "tree", canvas));
}

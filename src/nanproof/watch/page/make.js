// Elements. Text only ever as textContent: what a log says stays text.

export function make(tag, text, name) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (name) node.className = name;
  return node;
}

export function dot(colour) {
  const node = make("span", undefined, "dot");
  node.style.background = colour;
  return node;
}

// A command with a button that copies it.
export function command(text) {
  const box = make("span", undefined, "command");
  const button = make("button", "copy");
  button.type = "button";
  button.title = `Copy: ${text}`;
  button.addEventListener("click", () => copy(text, button));
  box.append(make("code", text), button);
  return box;
}

// Copy a text; the button that was pressed says so for a moment.
export async function copy(text, button) {
  const label = button.dataset.label ??= button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = make("textarea", text);
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "copied";
  setTimeout(() => { button.textContent = label; }, 1500);
}

export function table(heads, rows, name = "") {
  const box = make("div", undefined, "scroll");
  const node = make("table", undefined, name);
  const head = make("tr");
  for (const text of heads) head.append(make("th", text));
  node.append(head);
  for (const row of rows) {
    const line = make("tr");
    for (const cell of row) {
      if (cell instanceof Node) {
        const td = make("td");
        td.append(cell);
        line.append(td);
      } else {
        line.append(make("td", cell));
      }
    }
    node.append(line);
  }
  box.append(node);
  return box;
}

// Build what is shown only when it has changed; what was opened stays open, and the keyboard's focus where it was.
export function refresh(place, key, build) {
  const text = JSON.stringify(key);
  if (shown.get(place) === text) return;
  shown.set(place, text);
  const opened = new Map([...place.querySelectorAll("details")].map((node) => [node.dataset.run, node.open]));
  const focused = reachable(place).indexOf(document.activeElement);
  place.replaceChildren(...build());
  for (const node of place.querySelectorAll("details")) node.open = opened.get(node.dataset.run) ?? node.open;
  if (focused >= 0) reachable(place)[focused]?.focus({ preventScroll: true });
}

const reachable = (place) => [...place.querySelectorAll("a, button, input, summary")];

const shown = new WeakMap();

// Layers over time: one heat map for each quantity that the guard's watches wrote, a row for each layer.

import { make, refresh } from "./make.js";
import { show } from "./series.js";

const ROW = 14, NAMES = {
  headroom: "headroom to the dtype's maximum", grad_norm: "gradient norm", weight_norm: "weight norm", update_ratio: "update ratio",
  absmax: "largest output", param: "largest weight",
};
const POWERS = ["headroom"]; // logarithms already
const STOPS = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

export class Layers {
  constructor(place, choose) {
    Object.assign(this, { place, choose, quantity: "", run: "" });
  }

  draw(runs, range) {
    const found = new Map(); // quantity → run → [[layer, curve]]
    for (const run of runs) {
      for (const curve of run.curves.values()) {
        if (!curve.layer) continue;
        const [quantity, layer] = curve.layer;
        if (!found.has(quantity)) found.set(quantity, new Map());
        const mine = found.get(quantity);
        if (!mine.has(run)) mine.set(run, []);
        mine.get(run).push([layer, curve]);
      }
    }
    this.place.hidden = !found.size;
    if (!found.size) return;
    const quantities = Object.keys(NAMES).filter((name) => found.has(name));
    if (!found.has(this.quantity)) this.quantity = quantities[0];
    const mine = found.get(this.quantity);
    const run = [...mine.keys()].find((r) => r.id === this.run) ?? [...mine.keys()][0];
    const rows = mine.get(run).sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }));
    const dark = document.documentElement.dataset.theme;
    const key = [quantities, this.quantity, run.id, rows.length, rows[0][1].lastStep, range, this.place.clientWidth, dark, mine.size];
    refresh(this.place, key, () => [make("h2", "Layers"), this.pick(quantities, mine, run), this.map(rows, range)]);
  }

  pick(quantities, mine, run) {
    const box = make("div", undefined, "picks");
    const add = (text, pressed, press) => {
      const button = make("button", text);
      button.type = "button";
      button.setAttribute("aria-pressed", String(pressed));
      button.addEventListener("click", () => { press(); this.choose(); });
      box.append(button);
    };
    for (const name of quantities) add(NAMES[name], name === this.quantity, () => { this.quantity = name; });
    if (mine.size > 1) for (const one of mine.keys()) add(one.name, one === run, () => { this.run = one.id; });
    return box;
  }

  map(rows, { min, max }) {
    const box = make("div", undefined, "heat");
    const canvas = make("canvas");
    const note = make("p", undefined, "quiet");
    box.append(canvas, note);
    requestAnimationFrame(() => paint(canvas, note, rows, this.quantity, min, max));
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${NAMES[this.quantity]} of ${rows.length} layers over the steps`);
    canvas.addEventListener("pointermove", (event) => {
      const row = rows[Math.floor(event.offsetY / ROW)];
      if (!row) return;
      const left = Number(canvas.dataset.left);
      const step = min + (Math.max(0, event.offsetX - left) / (canvas.clientWidth - left)) * (max - min);
      const hit = row[1].bad.find(([from, to]) => from <= step && step <= to);
      note.textContent = `${row[0]}: ${hit ? "not finite" : show(at(row[1], step))} at ${show(Math.round(step))}`;
    });
    return box;
  }
}

function at(curve, step) {
  const [steps, values] = curve.parts[curve.parts.length - 1];
  let best = 0;
  while (best + 1 < steps.length && steps[best + 1] <= step) best += 1;
  return values[best];
}

function paint(canvas, note, rows, quantity, min, max) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth || 800;
  Object.assign(canvas, { width: width * ratio, height: rows.length * ROW * ratio });
  canvas.style.width = `${width}px`;
  canvas.style.height = `${rows.length * ROW}px`;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  const flat = POWERS.includes(quantity);
  const scaled = (v) => (flat ? v : Math.log10(v));
  const logs = rows.flatMap(([, curve]) => curve.parts.flatMap(([, values]) => values.filter((v) => flat || v > 0).map(scaled)));
  const low = logs.reduce((a, b) => Math.min(a, b), Infinity), high = logs.reduce((a, b) => Math.max(a, b), -Infinity);
  const look = getComputedStyle(document.body);
  ctx.font = `11px ${look.fontFamily}`;
  const left = Math.min(0.4 * width, 260, 10 + Math.max(...rows.map(([name]) => ctx.measureText(name).width)));
  canvas.dataset.left = left;
  const x = (step) => left + ((step - min) / (max - min || 1)) * (width - left);
  ctx.textBaseline = "middle";
  rows.forEach(([name, curve], i) => {
    const y = i * ROW;
    ctx.fillStyle = look.color;
    ctx.fillText(clipped(ctx, name, left - 8), 0, y + ROW / 2);
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, y, width - left, ROW - 1);
    ctx.clip();
    for (const [steps, values] of curve.parts) {
      steps.forEach((step, k) => {
        ctx.fillStyle = colour(flat || values[k] > 0 ? (scaled(values[k]) - low) / (high - low || 1) : 0);
        const next = k + 1 < steps.length ? steps[k + 1] : step + (k ? step - steps[k - 1] : 1);
        ctx.fillRect(x(step), y, Math.max(1, x(next) - x(step)) + 0.5, ROW - 1);
      });
    }
    ctx.fillStyle = "#c8102e";
    for (const [from, to] of curve.bad) ctx.fillRect(x(from), y, Math.max(3, x(to) - x(from)), ROW - 1);
    ctx.restore();
  });
  const [least, most] = flat ? [`2^${low.toFixed(0)}`, `2^${high.toFixed(0)}`] : [show(10 ** low), show(10 ** high)];
  const range = `steps ${show(Math.round(min))} to ${show(Math.round(max))}`;
  note.textContent = Number.isFinite(low) ? `${range}; dark ${least} … bright ${most}, logarithmic; red: not finite` : `${range}; red: not finite`;
}

function clipped(ctx, name, room) {
  let text = name;
  while (text.length > 4 && ctx.measureText(text).width > room) text = `…${text.slice(2)}`;
  return text;
}

function colour(share) {
  const place = Math.min(Math.max(share, 0), 0.9999) * (STOPS.length - 1);
  const i = Math.floor(place), part = place - i;
  return `rgb(${STOPS[i].map((v, k) => Math.round(v + (STOPS[i + 1][k] - v) * part)).join(" ")})`;
}

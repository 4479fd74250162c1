// One chart: the same quantity of all shown runs.

import { saveCsv, savePng } from "./export.js";
import { marks } from "./marks.js";
import { dot, make } from "./make.js";
import { brief, duration, faded, kindOf, show, smooth } from "./series.js";

const HEIGHT = 210;

const NAMED = 10; // runs whose values stand above a chart; of more the table has them

export class Chart {
  constructor(title, app) {
    this.app = app;
    this.title = title;
    this.entries = [];
    this.figure = make("figure");
    const caption = make("figcaption");
    this.values = make("span", undefined, "values");
    const tools = make("span", undefined, "acts");
    this.pin = button(tools, "☆", `Pin ${title} to the top`, () => app.togglePin(title));
    this.pin.className = "pin";
    button(tools, "csv", `Save the points of ${title}`, () => saveCsv(title, this.entries));
    button(tools, "png", `Save a picture of ${title}`, () => savePng(title, this.plot.ctx.canvas, this.entries));
    caption.append(make("span", title, "title"), this.values, tools);
    this.place = make("div", undefined, "plot");
    this.place.tabIndex = 0;
    this.place.setAttribute("role", "img");
    this.place.addEventListener("keydown", (event) => this.key(event));
    this.place.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.figure.append(caption, this.place);
    new ResizeObserver(() => this.plot && this.plot.setSize({ width: this.place.clientWidth, height: this.height() })).observe(this.place);
  }

  height() {
    return this.figure.classList.contains("wide") ? 300 : HEIGHT;
  }

  // entries: [{label, colour, curve, time, run}]
  draw(entries, wide, pinned) {
    this.entries = entries;
    this.marks = this.app.marksOf(entries);
    this.figure.classList.toggle("wide", wide);
    this.pin.textContent = pinned ? "★" : "☆";
    this.pin.setAttribute("aria-pressed", String(pinned));
    const { logarithmic, weight, byTime } = this.app.view;
    const tables = [], series = [{}];
    const add = (x, y, look) => {
      if (!x.length) return;
      tables.push([x, y]);
      series.push({ width: 1.25, points: { show: x.length < 3 }, ...look });
    };
    for (const entry of entries) {
      entry.curve.parts.forEach((part, i) => {
        const old = i < entry.curve.parts.length - 1;
        const [steps, values] = holed(part, entry.curve.bad);
        const x = byTime && entry.time ? steps.map(entry.time) : steps;
        const y = logarithmic ? values.map((v) => (v > 0 ? v : null)) : values;
        add(x, y, { stroke: faded(entry.colour, weight ? 0.25 : old ? 0.45 : 1) });
        if (weight) add(x, smooth(y, weight), { stroke: entry.colour, width: 1.75, points: { show: false } });
      });
      const [x, y] = entry.forecast ? entry.forecast.parts[entry.forecast.parts.length - 1] : [[], []];
      add(byTime && entry.time ? x.map(entry.time) : x, y, { stroke: entry.colour, dash: [5, 4], points: { show: false } });
    }
    const range = this.app.zoomed ?? this.app.extent();
    const data = tables.length ? window.uPlot.join(tables) : [[range.min, range.max], [null, null]];
    if (!tables.length) series.push({});
    const shape = `${series.length}|${logarithmic}|${byTime}|${weight > 0}|${this.app.dark()}|${wide}|${entries.map((e) => e.colour)}`;
    if (this.plot && shape === this.shape) {
      this.plot.setData(data, false);
    } else {
      this.shape = shape;
      this.plot?.destroy();
      this.plot = new window.uPlot(this.options(series), data, this.place);
    }
    this.plot.setScale("x", range);
    this.say();
  }

  options(series) {
    const family = getComputedStyle(document.body).fontFamily;
    const probe = make("i");
    document.body.append(probe);
    const colour = (name) => {
      probe.style.color = `var(${name})`;
      return getComputedStyle(probe).color;
    };
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--grid"), width: 1 }, font: `11px ${family}` };
    probe.remove();
    const logarithmic = this.app.view.logarithmic;
    const room = (_, min, max) => {
      if (min === null || min === undefined) return logarithmic ? [0.1, 1] : [0, 1];
      return logarithmic ? window.uPlot.rangeLog(min, max, 10, false) : window.uPlot.rangeNum(min, max, 0.1, true);
    };
    return {
      width: this.place.clientWidth || 400,
      height: this.height(),
      series,
      scales: { x: { time: false }, y: { distr: logarithmic ? 3 : 1, range: room } },
      axes: [
        { ...axis, size: 32, values: (_, ticks) => ticks.map((t) => (this.app.view.byTime ? duration(t) : t.toLocaleString("en"))) },
        { ...axis, size: 62, values: (_, ticks) => ticks.map((t) => (t === null ? "" : brief(t))) },
      ],
      cursor: { sync: { key: "nanproof" }, drag: { x: true, y: false, setScale: false } },
      plugins: [marks(() => this.marks)],
      hooks: {
        setCursor: [() => this.say()],
        setScale: [(plot, key) => {
          if (key === "x") Object.assign(this.place.dataset, { low: plot.scales.x.min, high: plot.scales.x.max });
        }],
        setSelect: [(plot) => {
          if (plot.select.width < 4) return;
          const min = plot.posToVal(plot.select.left, "x");
          const max = plot.posToVal(plot.select.left + plot.select.width, "x");
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          this.app.zoom(min, max);
        }],
      },
    };
  }

  say() {
    const left = this.plot?.cursor.left;
    const x = left === null || left === undefined || left < 0 ? undefined : this.plot.posToVal(left, "x");
    this.values.replaceChildren();
    const texts = [], many = this.entries.length > NAMED;
    let broken = 0;
    for (const { label, colour, curve, time } of this.entries) {
      let text = show(curve.last), bad = !Number.isFinite(curve.last);
      if (x !== undefined) {
        const place = (step) => (this.app.view.byTime && time ? time(step) : step);
        const hit = curve.bad.find(([from, to]) => place(from) <= x && x <= place(to));
        bad = Boolean(hit);
        text = hit ? kindOf(hit) : show(near(curve, x, this.app.view.byTime ? time : null));
      }
      texts.push(`${label} ${text}`);
      broken += bad;
      if (many) continue;
      const value = make("span", undefined, bad ? "value bad" : "value");
      if (this.entries.length > 1) value.append(dot(colour));
      value.append(this.entries.length > 1 && this.entries.length < 4 ? `${label} ${text}` : text);
      value.title = label;
      this.values.append(value);
    }
    if (many) this.values.append(make("span", `${this.entries.length} runs${broken ? `, ${broken} not finite` : ""}`, "value"));
    if (x !== undefined) this.values.append(make("span", `at ${this.app.view.byTime ? duration(x) : Math.round(x).toLocaleString("en")}`));
    const holes = this.marks.bands.filter((band) => band.own).map((band) => band.label);
    this.place.dataset.bands = holes.join("; ");
    this.place.setAttribute("aria-label", `${this.title}: ${texts.join(", ")}${holes.length ? `; ${holes.slice(0, 5).join("; ")}` : ""}`);
  }

  key(event) {
    const { min, max } = this.plot.scales.x;
    const span = max - min;
    const moves = { ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2], "+": [0.2, -0.2], "=": [0.2, -0.2], "-": [-0.3, 0.3] };
    if (event.key === "0") this.app.reset();
    else if (moves[event.key]) this.app.zoom(min + moves[event.key][0] * span, max + moves[event.key][1] * span);
    else return;
    event.preventDefault();
  }

  wheel(event) {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    const { min, max } = this.plot.scales.x;
    const turn = event.deltaY || event.deltaX;
    if (event.shiftKey) {
      const shift = Math.sign(turn) * 0.1 * (max - min);
      this.app.zoom(min + shift, max + shift);
      return;
    }
    const at = this.plot.posToVal(event.clientX - this.plot.over.getBoundingClientRect().left, "x");
    const factor = turn > 0 ? 1.25 : 0.8;
    this.app.zoom(at - (at - min) * factor, at + (max - at) * factor);
  }
}

function button(place, text, title, press) {
  const node = make("button", text);
  node.type = "button";
  node.title = title;
  node.setAttribute("aria-label", title);
  node.addEventListener("click", press);
  place.append(node);
  return node;
}

// The points of a part, with a hole wherever values were not finite: no line may lead across.
function holed([steps, values], bad) {
  const inside = bad.filter(([from]) => from > steps[0] && from < steps[steps.length - 1]).map(([from]) => from);
  if (!inside.length) return [steps, values];
  inside.sort((a, b) => a - b);
  const x = [], y = [];
  let next = 0;
  steps.forEach((step, i) => {
    for (; next < inside.length && inside[next] < step; next += 1) {
      x.push(inside[next]);
      y.push(null);
    }
    x.push(step);
    y.push(values[i]);
  });
  return [x, y];
}

function near(curve, x, time) {
  const [steps, values] = curve.parts[curve.parts.length - 1];
  let best = 0, low = 0, high = steps.length - 1;
  const place = (i) => (time ? time(steps[i]) : steps[i]);
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (place(middle) <= x) { best = middle; low = middle + 1; } else high = middle - 1;
  }
  return values[best];
}

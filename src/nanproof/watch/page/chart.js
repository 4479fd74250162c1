// One chart: the same quantity of all shown runs.

import { marks } from "./marks.js";
import { brief, show, smooth } from "./series.js";

const HEIGHT = 210;

export class Chart {
  constructor(title, wide, app) {
    this.app = app;
    this.title = title;
    this.entries = [];
    this.figure = document.createElement("figure");
    this.figure.className = wide ? "wide" : "";
    const caption = document.createElement("figcaption");
    const name = document.createElement("span");
    name.textContent = title;
    this.values = document.createElement("span");
    this.values.className = "values";
    caption.append(name, this.values);
    this.place = document.createElement("div");
    this.place.className = "plot";
    this.place.tabIndex = 0;
    this.place.setAttribute("role", "img");
    this.place.addEventListener("keydown", (event) => this.key(event));
    this.place.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    this.figure.append(caption, this.place);
    this.height = wide ? 300 : HEIGHT;
    new ResizeObserver(() => this.plot && this.plot.setSize({ width: this.place.clientWidth, height: this.height })).observe(this.place);
  }

  // entries: [{label, colour, curve, time}]
  draw(entries) {
    this.entries = entries;
    const { logarithmic, weight, byTime } = this.app.view;
    const tables = [], series = [{}];
    for (const entry of entries) {
      entry.curve.parts.forEach((part, i) => {
        const old = i < entry.curve.parts.length - 1;
        const x = byTime && entry.time ? part[0].map(entry.time) : part[0];
        const y = logarithmic ? part[1].map((v) => (v > 0 ? v : null)) : part[1];
        if (!x.length) return;
        tables.push([x, y]);
        series.push({ stroke: faded(entry.colour, weight ? 0.25 : old ? 0.45 : 1), width: 1.25, spanGaps: true, points: { show: x.length < 3 } });
        if (weight) {
          tables.push([x, smooth(y, weight)]);
          series.push({ stroke: entry.colour, width: 1.75, spanGaps: true, points: { show: false } });
        }
      });
    }
    const data = tables.length ? window.uPlot.join(tables) : [[0, 1], [null, null]];
    if (!tables.length) series.push({});
    this.say();
    const shape = `${series.length}|${logarithmic}|${byTime}|${weight > 0}|${this.app.dark()}`;
    if (this.plot && shape === this.shape) {
      const { min, max } = this.plot.scales.x;
      this.plot.setData(data, !this.app.zoomed);
      if (this.app.zoomed) this.plot.setScale("x", { min, max });
      return;
    }
    this.shape = shape;
    this.plot?.destroy();
    this.plot = new window.uPlot(this.options(series), data, this.place);
    if (this.app.zoomed) this.plot.setScale("x", this.app.zoomed);
  }

  options(series) {
    const family = getComputedStyle(document.body).fontFamily;
    const probe = document.createElement("i");
    document.body.append(probe);
    const colour = (name) => {
      probe.style.color = `var(${name})`;
      return getComputedStyle(probe).color;
    };
    const axis = { stroke: colour("--soft"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { stroke: colour("--grid"), width: 1 }, font: `11px ${family}` };
    probe.remove();
    return {
      width: this.place.clientWidth || 400,
      height: this.height,
      series,
      scales: { x: { time: false }, y: { distr: this.app.view.logarithmic ? 3 : 1 } },
      axes: [
        { ...axis, values: (_, ticks) => ticks.map((t) => (this.app.view.byTime ? duration(t) : t.toLocaleString("en"))) },
        { ...axis, size: 62, values: (_, ticks) => ticks.map((t) => (t === null ? "" : brief(t))) },
      ],
      cursor: { sync: { key: "nanproof" }, drag: { x: true, y: false, setScale: false } },
      plugins: [marks(() => this.app.marksOf(this.entries))],
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
    const at = this.plot?.cursor.idx;
    const x = at === null || at === undefined ? undefined : this.plot.data[0][at];
    this.values.replaceChildren();
    const texts = [];
    for (const { label, curve, time } of this.entries) {
      let value = curve.last, bad = !Number.isFinite(value);
      if (x !== undefined) {
        const step = this.app.view.byTime && time ? null : x;
        const hit = step !== null && curve.bad.find(([from, to]) => from <= step && step <= to);
        bad = Boolean(hit);
        value = hit ? (hit[2] ? NaN : Infinity) : near(curve, x, this.app.view.byTime ? time : null);
      }
      const span = document.createElement("span");
      span.className = bad ? "bad" : "";
      span.textContent = `${texts.length ? "   " : ""}${this.entries.length > 1 ? `${label} ` : ""}${show(value)}`;
      texts.push(`${label} ${show(value)}`);
      this.values.append(span);
    }
    if (x !== undefined) {
      const where = document.createElement("span");
      where.textContent = `   at ${this.app.view.byTime ? duration(x) : Math.round(x).toLocaleString("en")}`;
      this.values.append(where);
    }
    this.place.setAttribute("aria-label", `${this.title}: ${texts.join(", ")}`);
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

function faded(colour, alpha) {
  return colour + Math.round(alpha * 255).toString(16).padStart(2, "0");
}

export function duration(seconds) {
  const s = Math.round(seconds);
  if (Math.abs(s) < 120) return `${s} s`;
  if (Math.abs(s) < 7200) return `${Math.floor(s / 60)} min`;
  return `${(s / 3600).toFixed(1)} h`;
}

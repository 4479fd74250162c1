// The curves of one run in the browser: columns of points, cut where the run was resumed.

import { number } from "./source.js";

export class Curve {
  constructor(column) {
    this.name = column.name;
    this.role = column.role;
    this.layer = column.layer;
    this.parts = [];
    let at = 0;
    for (const length of column.lengths) {
      if (length) this.parts.push(sorted(column.steps.subarray(at, at + length), column.values.subarray(at, at + length)));
      at += length;
    }
    if (!this.parts.length) this.parts.push([[], []]);
    this.bad = column.bad;
    this.last = column.last;
    this.lastStep = column.last_step;
    this.total = column.total;
  }

  append(news) {
    const [steps] = this.parts[this.parts.length - 1];
    let end = steps.length ? steps[steps.length - 1] : -Infinity;
    news.steps.forEach((step, i) => {
      if (step < end) this.parts.push([[], []]);
      const part = this.parts[this.parts.length - 1];
      part[0].push(step);
      part[1].push(news.values[i]);
      end = step;
    });
    const [first, ...others] = news.bad;
    const before = this.bad[this.bad.length - 1];
    // one stretch that goes on is one band, however many messages it came in
    if (first && before && !Number.isFinite(this.last) && !news.steps.some((step) => step < first[0]) && first[0] >= before[1]) {
      this.bad = [...this.bad.slice(0, -1), [before[0], first[1], ...[2, 3, 4].map((i) => before[i] + first[i])], ...others];
    } else {
      this.bad = this.bad.concat(news.bad);
    }
    this.last = number(news.last);
    this.lastStep = news.last_step;
    this.total += news.steps.length;
  }
}

function sorted(steps, values) {
  const order = Array.from(steps.keys()).sort((a, b) => steps[a] - steps[b]);
  const x = [], y = [];
  for (const i of order) {
    if (x.length && steps[i] === x[x.length - 1]) {
      y[y.length - 1] = values[i];
    } else {
      x.push(steps[i]);
      y.push(values[i]);
    }
  }
  return [x, y];
}

export function smooth(values, weight) {
  let mean = 0, norm = 0;
  return values.map((v) => {
    if (v === null || v === undefined) return v;
    mean = weight * mean + (1 - weight) * v;
    norm = weight * norm + (1 - weight);
    return mean / norm;
  });
}

// Seconds for a step, read off the run's own clock; null where it has none.
export function clock(curve) {
  if (!curve) return null;
  const [steps, seconds] = curve.parts[curve.parts.length - 1];
  if (steps.length < 2) return null;
  return (step) => {
    let low = 0, high = steps.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (steps[middle] <= step) low = middle; else high = middle;
    }
    const span = steps[high] - steps[low] || 1;
    return seconds[low] - seconds[0] + ((step - steps[low]) / span) * (seconds[high] - seconds[low]);
  };
}

export function show(value) {
  if (value === undefined || value === null) return "–";
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "Inf" : "-Inf";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e12) return value.toLocaleString("en");
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2);
  return value.toPrecision(4);
}

// The same without the zeros at the end, for axes.
export function brief(value) {
  const text = Math.abs(value) >= 1e5 ? value.toExponential(2) : show(value);
  return text.replace(/(\.\d*?)0+(?=$|e)/, "$1").replace(/\.(?=$|e)/, "");
}

export function duration(seconds) {
  const s = Math.round(seconds);
  if (Math.abs(s) < 120) return `${s} s`;
  if (Math.abs(s) < 7200) return `${Math.floor(s / 60)} min`;
  return `${(s / 3600).toFixed(1)} h`;
}

// What a stretch of non-finite values holds, in a word.
export function kindOf([, , nan, plus, minus]) {
  return [nan && "NaN", plus && "Inf", minus && "-Inf"].filter(Boolean).join(", ");
}

export function faded(colour, alpha) {
  return colour + Math.round(alpha * 255).toString(16).padStart(2, "0");
}

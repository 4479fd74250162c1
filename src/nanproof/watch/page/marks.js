// What is drawn over a chart: bands where values were not finite, forecasts, marks of skips, rollbacks, resumes.

import { faded } from "./series.js";

export const MARKED = { skip: "#d98a00", rollback: "#8a4fd0", resume: "#7c828b", incident: "#c8102e" };
const ROW = 13;

export function marks(get) {
  return {
    hooks: {
      drawClear: (plot) => draw(plot, (pen) => bands(pen, get().bands)),
      draw: (plot) => draw(plot, (pen) => {
        const { bands: found, lines } = get();
        ticks(pen, lines);
        labels(pen, found);
      }),
    },
  };
}

function draw(plot, paint) {
  const { ctx } = plot;
  const { left, top, width, height } = plot.bbox;
  const ratio = devicePixelRatio || 1;
  const place = (x) => plot.valToPos(x, "x", true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  paint({ ctx, left, top, width, height, ratio, place });
  ctx.restore();
}

function span({ left, width, ratio, place }, { from, to }) {
  const x0 = Math.max(place(from) - ratio, left);
  return [x0, Math.min(Math.max(place(to) + ratio, x0 + 2 * ratio), left + width)];
}

// The whole height, hatched in the run's own color: whoever sees the chart sees where there is no value.
function bands(pen, found) {
  const { ctx, top, height, ratio, left, width } = pen;
  for (const band of found) {
    const [x0, x1] = span(pen, band);
    if (x1 <= left || x0 >= left + width) continue;
    ctx.fillStyle = faded(band.colour, band.own ? 0.14 : 0.05);
    ctx.fillRect(x0, top, x1 - x0, height);
    if (!band.own) continue;
    ctx.save();
    ctx.beginPath();
    ctx.rect(x0, top, x1 - x0, height);
    ctx.clip();
    ctx.strokeStyle = faded(band.colour, 0.4);
    ctx.lineWidth = ratio;
    ctx.beginPath();
    const gap = 8 * ratio, phase = (band.row % 4) * 2 * ratio; // of runs that died together each shows its color
    for (let x = Math.floor((x0 - height) / gap) * gap + phase; x < x1; x += gap) {
      ctx.moveTo(x, top + height);
      ctx.lineTo(x + height, top);
    }
    ctx.stroke();
    ctx.restore();
    ctx.fillStyle = band.colour;
    ctx.fillRect(x0, top + 3 * band.row * ratio, x1 - x0, 3 * ratio);
  }
}

function ticks({ ctx, top, height, ratio, place }, lines) {
  for (const { at, kind } of lines) {
    const x = place(at);
    ctx.strokeStyle = MARKED[kind];
    ctx.lineWidth = ratio;
    ctx.setLineDash(kind === "resume" ? [4 * ratio, 4 * ratio] : []);
    ctx.globalAlpha = kind === "resume" ? 0.9 : 0.55;
    ctx.beginPath();
    ctx.moveTo(x, kind === "resume" ? top : top + height - 14 * ratio);
    ctx.lineTo(x, top + height);
    ctx.stroke();
  }
  ctx.setLineDash([]);
  ctx.globalAlpha = 1;
}

// One line of labels for each run; where bands lie too close, the widest of them speaks.
function labels(pen, found) {
  const { ctx, left, top, width, ratio } = pen;
  ctx.font = `600 ${11 * ratio}px system-ui, sans-serif`;
  ctx.textBaseline = "top";
  ctx.textAlign = "left";
  const taken = new Map();
  const measured = found.map((band) => [band, ...span(pen, band)]).filter(([, x0, x1]) => x1 > left && x0 < left + width);
  measured.sort((a, b) => b[0].own - a[0].own || b[2] - b[1] - (a[2] - a[1]));
  for (const [band, x0] of measured) {
    const wide = ctx.measureText(band.label).width + 8 * ratio;
    const at = Math.max(left, Math.min(x0 + 2 * ratio, left + width - wide));
    const row = taken.get(band.row) ?? [];
    if (row.some(([a, b]) => at < b && at + wide > a)) continue;
    taken.set(band.row, [...row, [at, at + wide]]);
    const y = top + (5 + band.row * (ROW + 3)) * ratio;
    ctx.fillStyle = band.own ? band.colour : faded(band.colour, 0.75);
    ctx.fillRect(at, y, wide, (ROW + 1) * ratio);
    ctx.fillStyle = "#fff";
    ctx.fillText(band.label, at + 4 * ratio, y + 2 * ratio);
  }
}

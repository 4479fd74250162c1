// What is drawn over a chart: red ticks where values were not finite, marks of skips, rollbacks, resumes, incidents.

export const MARKED = { bad: "#c8102e", skip: "#d98a00", rollback: "#8a4fd0", resume: "#7c828b", incident: "#c8102e" };

export function marks(get) {
  return {
    hooks: {
      draw: (plot) => {
        const { bad, lines } = get();
        const { ctx } = plot;
        const { left, top, width, height } = plot.bbox;
        const ratio = devicePixelRatio || 1;
        ctx.save();
        ctx.beginPath();
        ctx.rect(left, top, width, height);
        ctx.clip();
        for (const { at, kind } of lines) {
          const x = plot.valToPos(at, "x", true);
          ctx.strokeStyle = MARKED[kind];
          ctx.lineWidth = ratio;
          ctx.setLineDash(kind === "resume" ? [4 * ratio, 4 * ratio] : []);
          ctx.globalAlpha = kind === "resume" ? 0.9 : 0.55;
          ctx.beginPath();
          ctx.moveTo(x, kind === "resume" ? top : top + height - 14 * ratio);
          ctx.lineTo(x, top + height);
          ctx.stroke();
        }
        ctx.globalAlpha = 1;
        ctx.fillStyle = MARKED.bad;
        for (const [from, to] of bad) {
          const x0 = plot.valToPos(from, "x", true);
          const x1 = plot.valToPos(to, "x", true);
          ctx.fillRect(x0 - ratio, top, Math.max(2 * ratio, x1 - x0 + 2 * ratio), 9 * ratio);
        }
        ctx.restore();
      },
    },
  };
}

// A chart as a file: its points as CSV, its picture as PNG.

function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^\w.-]+/g, "_");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const quoted = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);

export function csv(name, entries) {
  const lines = ["run,metric,step,value"];
  for (const { label, curve } of entries) {
    const rows = curve.parts.flatMap(([steps, values]) => Array.from(steps, (step, i) => [step, String(values[i])]));
    for (const [from, to, nan, plus] of curve.bad) {
      const word = nan ? "NaN" : plus ? "Infinity" : "-Infinity";
      rows.push([from, word]);
      if (to !== from) rows.push([to, word]); // of a long stretch its first and its last step
    }
    rows.sort((a, b) => a[0] - b[0]);
    for (const [step, value] of rows) lines.push(`${quoted(label)},${quoted(name)},${step},${value}`);
  }
  return `${lines.join("\n")}\n`;
}

export function saveCsv(name, entries) {
  save(new Blob([csv(name, entries)], { type: "text/csv" }), `${name}.csv`);
}

export function savePng(name, canvas, entries) {
  const picture = document.createElement("canvas");
  const ratio = devicePixelRatio || 1, head = 26 * ratio;
  picture.width = canvas.width;
  picture.height = canvas.height + head;
  const ctx = picture.getContext("2d");
  const look = getComputedStyle(document.body);
  ctx.fillStyle = look.backgroundColor;
  ctx.fillRect(0, 0, picture.width, picture.height);
  ctx.font = `600 ${13 * ratio}px ${look.fontFamily}`;
  ctx.textBaseline = "middle";
  ctx.fillStyle = look.color;
  ctx.fillText(name, 8 * ratio, head / 2);
  let x = 20 * ratio + ctx.measureText(name).width;
  for (const { label, colour } of entries.length > 1 ? entries : []) {
    ctx.fillStyle = colour;
    ctx.fillText(label, x, head / 2);
    x += ctx.measureText(label).width + 12 * ratio;
  }
  ctx.drawImage(canvas, 0, head);
  picture.toBlob((blob) => save(blob, `${name}.png`), "image/png");
}

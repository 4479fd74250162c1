// The right-hand side: last values, incidents, events; and one incident in full. Text only ever as textContent.

import { duration } from "./chart.js";
import { number } from "./source.js";
import { show } from "./series.js";

export function make(tag, text, name) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (name) node.className = name;
  return node;
}

export function summary(place, runs) {
  place.replaceChildren();
  for (const run of runs) {
    const title = make("h3");
    const dot = make("span", undefined, "dot");
    dot.style.background = run.colour;
    title.append(dot, make("span", run.name));
    const list = make("dl");
    const row = (name, value, bad) => {
      list.append(make("dt", name), make("dd", value, bad ? "bad" : ""));
    };
    const loss = run.first("loss") ?? run.first("component");
    const steps = loss ? loss.parts[loss.parts.length - 1][0] : [];
    const step = loss ? loss.lastStep : 0;
    row(run.unit, run.max_steps ? `${show(step)} of ${show(run.max_steps)}` : show(step));
    for (const role of ["loss", "grad_norm", "lr", "loss_scale"]) {
      const curve = run.first(role);
      if (curve) row(curve.name, show(curve.last), !Number.isFinite(curve.last));
    }
    const clock = run.clock();
    if (clock && steps.length > 1) {
      const pace = (steps[steps.length - 1] - steps[0]) / (clock(steps[steps.length - 1]) - clock(steps[0]));
      if (Number.isFinite(pace) && pace > 0) {
        row("pace", `${show(Number(pace.toPrecision(3)))} ${run.unit}s/s`);
        if (run.max_steps > step) row("to go", duration((run.max_steps - step) / pace));
      }
    }
    for (const kind of ["skip", "rollback", "overflow", "resume"]) if (run.counts[kind]) row(`${kind}s`, show(run.counts[kind]));
    place.append(title, list);
  }
}

export function incidents(place, runs, open) {
  place.replaceChildren();
  const all = runs.flatMap((run) => run.incidents.map((incident) => ({ run, incident })));
  if (!all.length) place.append(make("li", "none", "quiet"));
  all.sort((a, b) => b.incident.step - a.incident.step);
  for (const { run, incident } of all.slice(0, 100)) {
    const item = make("li");
    const button = make("button");
    button.type = "button";
    button.append(make("strong", incident.verdict), make("small", [incident.action, incident.mechanism, incident.where].filter(Boolean).join(" · ")));
    if (runs.length > 1) button.append(make("small", run.name));
    button.addEventListener("click", () => open(run, incident));
    item.append(button);
    place.append(item);
  }
}

const LOUD = { nan: "bad", exception: "bad", overflow: "warn", skip: "warn", rollback: "warn", stop: "bad", hardware: "bad" };

export function events(place, runs) {
  place.replaceChildren();
  const all = runs.flatMap((run) => run.events.map((event) => ({ run, event })));
  if (!all.length) place.append(make("li", "none", "quiet"));
  for (const { run, event } of all.slice(-200).reverse()) {
    const item = make("li");
    const where = event.step === null || event.step === undefined ? event.kind : `${event.kind} ${show(event.step)}`;
    item.append(make("span", where, LOUD[event.kind] ?? ""), make("span", runs.length > 1 ? `${run.name}: ${event.text}` : event.text));
    place.append(item);
  }
}

export function detail(place, incident) {
  place.replaceChildren(make("h2", verdictWords(incident)));
  place.append(make("p", `${incident.action.kind}${incident.action.reason ? `: ${incident.action.reason}` : ""}`));
  place.append(make("p", `${incident.time} · rank ${incident.rank} of ${incident.world_size}`, "quiet"));
  const found = incident.location;
  if (found) {
    place.append(make("h3", `${found.mechanism} in ${found.op || "a value"} (${found.phase ?? ""})`));
    place.append(make("p", `${found.file}:${found.line} in ${found.function}${found.module ? `, module ${found.module}` : ""}`, "quiet"));
    if (found.code?.length) place.append(frame(found.code));
    if (found.why) place.append(make("p", found.why));
    if (found.chain?.length) place.append(make("p", `path: ${found.chain.join(" → ")}`, "quiet"));
    if (found.verified) place.append(make("p", "verified: without this operation the step is finite"));
    tensors(place, "Inputs and outputs", [...(found.inputs ?? []), ...(found.outputs ?? [])]);
  }
  tensors(place, "Tensors", incident.tensors ?? []);
  tensors(place, "Taps", incident.taps ?? []);
  readings(place, incident.readings ?? []);
  for (const note of incident.notes ?? []) place.append(make("p", note, "quiet"));
}

function verdictWords(incident) {
  const v = incident.verdict;
  return `Step ${incident.step.toLocaleString("en")}: ${v.kind}${v.level ? ` ${v.level}` : ""}${v.names?.length ? ` (${v.names.slice(0, 4).join(", ")})` : ""}`;
}

function frame(lines) {
  const pre = make("pre");
  for (const line of lines) {
    const marked = line.trimStart().startsWith(">");
    pre.append(make(marked ? "mark" : "span", `${line}\n`));
  }
  return pre;
}

function tensors(place, title, facts) {
  if (!facts.length) return;
  table(place, title, ["tensor", "shape", "dtype", "NaN", "+Inf", "−Inf", "finite from", "to", "first bad"], facts.slice(0, 60).map((f) => [
    f.name, `[${f.shape.join(", ")}]`, f.dtype, show(f.nan), show(f.posinf), show(f.neginf), show(number(f.finite_min)),
    show(number(f.finite_max)), f.first_bad ? `[${f.first_bad.join(", ")}]` : "",
  ]));
}

function readings(place, list) {
  table(place, "The steps before", ["step", "loss", "gradient norm", "lr", "scale"], list.slice(-12).map((r) => [
    show(r.step), show(number(r.loss)), show(number(r.grad_norm)), show(number(r.lr)), r.scale === null ? "" : show(number(r.scale)),
  ]));
}

function table(place, title, heads, rows) {
  if (!rows.length) return;
  const box = make("div", undefined, "scroll");
  const node = make("table");
  const head = make("tr");
  for (const name of heads) head.append(make("th", name));
  node.append(head);
  for (const row of rows) {
    const line = make("tr");
    for (const cell of row) line.append(make("td", cell));
    node.append(line);
  }
  box.append(node);
  place.append(make("h3", title), box);
}

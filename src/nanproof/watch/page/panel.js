// What stands around the charts: the state of each run, the table of runs, last values, messages of the log.

import { command, dot, make, refresh, table } from "./make.js";
import { duration, show } from "./series.js";

const TABLE = 12; // settings that differ, as columns

const WORST = ["died", "stopped", "interrupted"];
const STATES = 3;
const WAITING = "looking for the cause in logs, code and checkpoints …";

// What one must know first: the state, then the cause and what to do. Of several runs those that ended badly, the worst
// first; the table has all.
export function states(place, runs) {
  const shown = worst(runs);
  refresh(place, shown.map((run) => [run.id, run.state, Boolean(run.facts), run.facts?.why, runs.length === 1]), () => {
    const lines = shown.slice(0, STATES).map((run) => state(run, runs.length === 1));
    if (shown.length > STATES) lines.push(make("p", `and ${shown.length - STATES} more that ended badly, in the table`, "state quiet"));
    return lines;
  });
}

// All of them, or those that are told on top.
export function worst(runs, all = false) {
  const shown = runs.filter((run) => all || (run.shown && (runs.length === 1 || run.state.bad)));
  return shown.sort((a, b) => b.state.bad - a.state.bad || WORST.indexOf(a.state.kind) - WORST.indexOf(b.state.kind) || (b.state.since ?? -1) - (a.state.since ?? -1));
}

// How long the diagnosis has taken so far: in a large project it reads for a while.
export function waited(run, seconds) {
  const place = document.querySelector(`[data-waiting="${run.id}"]`);
  if (place) place.textContent = `${WAITING} ${duration(seconds)}`;
}

function state(run, alone) {
  const box = make("div", undefined, `state ${run.state.kind}${run.state.bad ? " bad" : ""}`);
  const [head, ...rest] = run.state.text.split(": ");
  const line = make("p");
  line.append(dot(run.colour), make("span", run.name, "name"), make("strong", head));
  if (rest.length) line.append(make("span", rest.join(": "), "why"));
  box.append(line, ...repairs(run).map((text) => make("p", text, "why")));
  if (!run.facts && run.state.bad) { // keeps the place of what comes, so that nothing moves under the pointer
    const found = run.incidents.find((incident) => incident.cause && incident.where);
    const held = make("p", undefined, "quiet held");
    const progress = make("span", WAITING);
    progress.dataset.waiting = run.id;
    held.append(...(found ? [make("span", `cause: ${found.cause} at ${found.where}`, "why")] : []), progress);
    box.append(held, make("p", "▸ evidence", "quiet"));
    return box;
  }
  const { why } = run.facts ?? {};
  if (!why?.cause && !why?.command) return box;
  const more = make("p");
  if (why.cause) more.append(make("span", `cause: ${why.cause}`, "why"));
  if (why.repair) more.append(make("span", `repair: ${why.repair}`, "why"));
  if (why.command) more.append(command(why.command));
  box.append(more);
  const known = evidence(why, (why.commands ?? []).slice(1));
  if (!known.length) return box;
  const details = make("details");
  details.dataset.run = run.id;
  // in a report there is room to read; a page that lives must not move under the pointer
  details.open = alone && document.getElementById("data") !== null && matchMedia("(min-width: 901px)").matches;
  details.append(make("summary", "evidence"), ...known);
  box.append(details);
  return box;
}

const repairs = (run) => (run.state.repairs ?? []).map((repair) => `repair in force: ${repair}`);

function evidence(why, commands) {
  const facts = [...(why.evidence ?? []).map((text) => `for: ${text}`), ...(why.against ?? []).map((text) => `against: ${text}`), ...(why.ask ? [why.ask] : [])];
  const list = make("ul");
  list.append(...facts.map((text) => make("li", text)));
  return [...(facts.length ? [list] : []), ...commands.map(command)];
}

// A text that may be cut: all of it under the pointer.
function whole(node) {
  node.title = node.textContent;
  return node;
}

// Of a run that is not on top, the table alone says why, and what keeps it alive.
function cause(run, top) {
  const { why } = run.facts ?? {};
  const repaired = repairs(run).join("; ");
  if (!why?.cause || top.includes(run)) return make("span", [why?.cause, top.includes(run) ? "" : repaired].filter(Boolean).join("; ") || (run.facts ? "–" : "…"), "cause");
  const details = make("details", undefined, "cause");
  details.dataset.run = run.id;
  details.append(make("summary", why.cause), ...repairs(run).map((text) => make("p", text)), ...(why.repair ? [make("p", `repair: ${why.repair}`)] : []), ...evidence(why, why.commands ?? []));
  return details;
}

// Several runs beside each other, and the settings in which they differ.
export function compare(place, runs, toggle) {
  place.hidden = runs.length < 2;
  const key = runs.map((run) => [run.shown, run.state.headline, run.state.repairs, steps(run), String(run.loss()?.last), run.incidents.length, run.facts]);
  if (!place.hidden) refresh(place, key, () => comparison(runs, toggle));
}

function comparison(runs, toggle) {
  const all = runs.map((run) => run.facts?.settings ?? {});
  const keys = [...new Set(all.flatMap((settings) => Object.keys(settings)))];
  const known = all.filter((settings) => Object.keys(settings).length).length > 1;
  const differ = known && runs.length > 2 ? keys.filter((key) => new Set(all.map((settings) => settings[key])).size > 1).sort().slice(0, TABLE) : [];
  const top = worst(runs).slice(0, STATES);
  const causes = runs.some((run) => run.facts?.why?.cause || repairs(run).length);
  const heads = ["", "run", "state", "steps", "last loss", "incidents", ...(causes ? ["cause"] : []), ...differ];
  const rows = runs.map((run, i) => {
    const box = make("input");
    box.type = "checkbox";
    box.checked = run.shown;
    box.setAttribute("aria-label", `Show ${run.name}`);
    box.addEventListener("change", () => toggle(run));
    const name = make("span", undefined, "named");
    name.append(dot(run.colour), make("span", run.name));
    const loss = run.loss();
    const last = make("span", loss ? show(loss.last) : "–", loss && !Number.isFinite(loss.last) ? "bad" : "");
    const values = differ.map((key) => whole(make("span", all[i][key] ?? "–", "differs")));
    return [box, name, make("span", run.state.headline, `word ${run.state.kind}`), steps(run), last, show(run.incidents.length), ...(causes ? [cause(run, top)] : []), ...values];
  });
  return [table(heads, rows, "runs")];
}

function steps(run) {
  const step = run.lastStep();
  return step === null ? "–" : run.max_steps ? `${show(step)} of ${show(run.max_steps)}` : show(step);
}

// Where two runs part, and what was different around them.
export function parted(place, found, runs) {
  place.hidden = !found;
  if (!found) return;
  const names = runs.slice(0, 2).map((run) => run.name);
  const rows = [...found.settings, ...found.environment, ...(found.command ? [["command", ...found.command]] : [])];
  refresh(place, [found, names], () => [make("h2", "Comparison"), make("p", found.first), ...(rows.length ? [table(["", ...names], rows, "parted")] : [])]);
}

// Last values; of many runs the table has them.
export function summary(place, runs) {
  place.replaceChildren();
  for (const run of runs.length > 2 ? [] : runs) {
    const title = make("h3");
    title.append(dot(run.colour), make("span", run.name));
    const list = make("dl");
    const row = (name, value, bad) => list.append(make("dt", name), make("dd", value, bad ? "bad" : ""));
    row(run.unit, steps(run));
    for (const role of ["loss", "grad_norm", "lr", "loss_scale"]) {
      const curve = run.first(role);
      if (curve) row(curve.name, show(curve.last), !Number.isFinite(curve.last));
    }
    const clock = run.clock();
    const [first] = run.segments[run.segments.length - 1] ?? [0];
    const step = run.lastStep();
    if (clock && step > first) {
      const pace = (step - first) / (clock(step) - clock(first));
      if (Number.isFinite(pace) && pace > 0) {
        row("pace", `${show(Number(pace.toPrecision(3)))} ${run.unit}s/s`);
        if (run.max_steps > step && run.state.kind === "running") row("to go", duration((run.max_steps - step) / pace));
      }
    }
    for (const kind of ["skip", "rollback", "overflow", "resume"]) if (run.counts[kind]) row(`${kind}s`, show(run.counts[kind]));
    place.append(title, list);
  }
}

const LOUD = { nan: "bad", exception: "bad", overflow: "warn", skip: "warn", rollback: "warn", stop: "bad", hardware: "bad" };

// What the log says in words, without what an incident already tells.
export function events(section, place, runs) {
  const all = runs.flatMap((run) => {
    const told = new Set(run.incidents.map((incident) => incident.step));
    return run.events.filter((event) => !told.has(event.step)).map((event) => ({ run, event }));
  });
  section.hidden = !all.length;
  place.replaceChildren(...all.slice(-200).reverse().map(({ run, event }) => {
    const item = make("li");
    const where = event.step === null || event.step === undefined ? event.kind : `${event.kind} ${show(event.step)}`;
    item.append(make("span", where, LOUD[event.kind] ?? ""), make("span", runs.length > 1 ? `${run.name}: ${event.text}` : event.text));
    return item;
  }));
}

// What stands around the charts: the state of each run, the table of runs, last values, messages of the log.

import { command, dot, make, refresh, table } from "./make.js";
import { duration, show } from "./series.js";

const TABLE = 12; // settings that differ, as columns

// One line for each run: its state first, then the cause and what to do. Of several, those in trouble; the table has all.
export function states(place, runs) {
  const troubled = (run) => run.state.bad || run.facts?.why?.cause;
  const shown = runs.filter((run) => run.shown && (runs.length === 1 || troubled(run)));
  refresh(place, shown.map((run) => [run.id, run.state, run.facts?.why]), () => shown.map((run) => {
    const line = make("p", undefined, `state ${run.state.kind}${run.state.bad ? " bad" : ""}`);
    const [head, ...rest] = run.state.text.split(": ");
    line.append(dot(run.colour));
    if (runs.length > 1) line.append(make("span", run.name, "name"));
    line.append(make("strong", head));
    if (rest.length) line.append(make("span", rest.join(": "), "why"));
    const { why } = run.facts ?? {};
    if (why?.cause) line.append(make("span", `cause: ${why.cause}`, "why"));
    if (why?.ask) line.append(make("span", why.ask, "why"));
    if (why?.repair) line.append(make("span", `repair: ${why.repair}`, "why"));
    if (why?.command) line.append(command(why.command));
    return line;
  }));
}

// Several runs beside each other, and the settings in which they differ.
export function compare(place, runs, toggle) {
  place.hidden = runs.length < 2;
  const key = runs.map((run) => [run.shown, run.state.headline, steps(run), String(run.loss()?.last), run.incidents.length, run.facts?.settings]);
  if (!place.hidden) refresh(place, key, () => comparison(runs, toggle));
}

function comparison(runs, toggle) {
  const all = runs.map((run) => run.facts?.settings ?? {});
  const keys = [...new Set(all.flatMap((settings) => Object.keys(settings)))];
  const known = all.filter((settings) => Object.keys(settings).length).length > 1;
  const differ = known ? keys.filter((key) => new Set(all.map((settings) => settings[key])).size > 1).sort().slice(0, TABLE) : [];
  const heads = ["", "run", "state", "steps", "last loss", "incidents", ...differ];
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
    const values = differ.map((key) => make("span", all[i][key] ?? "–", "differs"));
    return [box, name, make("span", run.state.headline, `word ${run.state.kind}`), steps(run), last, show(run.incidents.length), ...values];
  });
  return [table(heads, rows, "runs")];
}

function steps(run) {
  const step = run.lastStep();
  return step === null ? "–" : run.max_steps ? `${show(step)} of ${show(run.max_steps)}` : show(step);
}

export function summary(place, runs) {
  place.replaceChildren();
  for (const run of runs) {
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

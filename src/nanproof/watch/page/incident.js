// Incidents: the list with its filters and its strip over time, and one of them in full.

import { command, dot, make, refresh, table } from "./make.js";
import { faded, show } from "./series.js";
import { number } from "./source.js";

const SHOWN = 100, FEW = 6;

export class Incidents {
  constructor({ list, filters, strip }, open) {
    Object.assign(this, { list, filters, strip, open });
    this.wanted = "";
    this.text = "";
  }

  draw(runs, extent) {
    const all = runs.flatMap((run) => run.incidents.map((incident) => ({ run, incident })));
    this.offer(all);
    const chosen = all.filter(({ incident }) => this.matches(incident));
    chosen.sort((a, b) => b.incident.step - a.incident.step);
    refresh(this.list, [chosen.map(({ incident }) => [incident.id, incident.cause]), all.length, runs.length], () => {
      const items = chosen.slice(0, SHOWN).map(({ run, incident }) => this.item(run, incident, runs.length > 1));
      if (!chosen.length) items.push(make("li", all.length ? "none that match" : "none", "quiet"));
      if (chosen.length > SHOWN) items.push(make("li", `and ${show(chosen.length - SHOWN)} more`, "quiet"));
      return items;
    });
    this.paint(chosen, extent, all.length > 1);
  }

  matches(incident) {
    const words = `${incident.verdict} ${incident.action} ${incident.cause} ${incident.where}`.toLowerCase();
    return (!this.wanted || incident.action === this.wanted || incident.kind === this.wanted) && words.includes(this.text);
  }

  offer(all) {
    this.filters.hidden = all.length < 2;
    const counts = new Map([["", all.length]]);
    for (const { incident } of all) for (const key of [incident.kind, incident.action]) counts.set(key, (counts.get(key) ?? 0) + 1);
    refresh(this.filters, [...counts], () => this.buttons(counts));
  }

  buttons(counts) {
    const find = make("input");
    find.type = "search";
    find.placeholder = "find";
    find.value = this.text;
    find.setAttribute("aria-label", "Find an incident");
    find.addEventListener("input", () => { this.text = find.value.toLowerCase(); this.changed(); });
    return [...[...counts].map(([key, count]) => {
      const button = make("button", `${key || "all"} ${show(count)}`);
      button.type = "button";
      button.setAttribute("aria-pressed", String(key === this.wanted));
      button.addEventListener("click", () => {
        this.wanted = key;
        for (const other of this.filters.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
        this.changed();
      });
      return button;
    }), find];
  }

  item(run, incident, named) {
    const item = make("li");
    const button = make("button");
    button.type = "button";
    const title = make("strong");
    if (named) title.append(dot(run.colour));
    title.append(incident.verdict);
    button.append(title, make("small", [named ? run.name : "", incident.action, incident.cause, incident.where].filter(Boolean).join(" · ")));
    button.addEventListener("click", () => this.open(run, incident));
    item.append(button);
    return item;
  }

  // Where they lie in time: a tick for each, in the color of its run.
  paint(chosen, { min, max }, wanted) {
    this.strip.hidden = !wanted;
    if (!wanted) return;
    const ratio = devicePixelRatio || 1;
    const width = this.strip.clientWidth || 300, height = 18;
    this.strip.width = width * ratio;
    this.strip.height = height * ratio;
    const ctx = this.strip.getContext("2d");
    for (const { run, incident } of chosen) {
      ctx.fillStyle = faded(run.colour, 0.7);
      ctx.fillRect(((incident.step - min) / (max - min || 1)) * (width - 2) * ratio, 0, 2 * ratio, height * ratio);
    }
  }
}

// Cause, evidence, code, tensors, samples, repair: in the order in which one asks.
export function detail(place, incident, why, name = "") {
  const title = make("h2", `${name ? `${name}, step` : "Step"} ${heading(incident)}`);
  title.tabIndex = -1;
  place.replaceChildren(title);
  const found = incident.location;
  const answer = `${incident.action.kind}${incident.action.reason ? `: ${incident.action.reason}` : ""}`;
  const rank = incident.world_size > 1 ? ` · rank ${incident.rank} of ${incident.world_size}` : "";
  place.append(make("p", `${answer} · ${incident.time.replace("T", " ").replace(/\.\d+Z$/, " UTC")}${rank}`, "quiet"));
  section(place, "Cause", cause(found, why));
  section(place, "Evidence", [...(found?.why ? [make("p", found.why)] : []), ...(found?.proof ? [make("p", found.proof, found.verified ? "good" : "quiet")] : []),
    ...(found?.chain?.length ? [make("p", `path: ${found.chain.join(" → ")}`, "quiet")] : []), ...list(why?.evidence), readings(incident.readings ?? [])]);
  section(place, "Code", code(found, incident));
  section(place, "Tensors", [tensors([...(found?.inputs ?? []), ...(found?.outputs ?? []), ...(incident.tensors ?? [])]), tensors(incident.taps ?? [], "taps")]);
  section(place, "Samples and notes", list(incident.notes));
  section(place, "Repair", [...(found?.advice ? [make("p", found.advice)] : []), ...(why?.repair ? [make("p", why.repair)] : []),
    ...[incident.command, ...(why?.commands ?? []).filter((text) => !text.startsWith("nanproof locate "))].map(command)]);
  if (found?.commit) section(place, "Suspect commit", [make("p", found.commit)]);
  section(place, "Environment", Object.keys(incident.environment ?? {}).length ? [make("p", Object.entries(incident.environment).map(([k, v]) => `${k} ${v}`).join(" · "), "quiet")] : []);
}

function heading(incident) {
  const v = incident.verdict;
  return `${incident.step.toLocaleString("en")}: ${v.kind}${v.level ? ` ${v.level}` : ""}${v.names?.length ? ` (${v.names.slice(0, 4).join(", ")})` : ""}`;
}

function cause(found, why) {
  const nodes = [];
  if (found?.reproduced) {
    const where = found.where ? `${found.where} in ${found.function}` : "outside the code that was traced";
    nodes.push(make("p", found.cause || found.why || "unknown", "strong"));
    nodes.push(make("p", `${where}${found.module ? `, module ${found.module}` : ""}${found.component ? `, loss term ${found.component}` : ""}`, "quiet"));
  } else if (found) {
    nodes.push(make("p", "The step did not fail when it was replayed."));
  } else {
    nodes.push(make("p", "This step was not located.", "quiet"));
  }
  if (why?.cause) nodes.push(make("p", `diagnosis of the run: ${why.cause}`));
  return nodes;
}

function code(found, incident) {
  if (!found?.code?.length) return [];
  const pre = make("pre");
  for (const line of found.code) pre.append(make("span", line, line.trimStart().startsWith(">") ? "culprit" : "line"));
  const nodes = [pre];
  if (found.stack?.length) nodes.unshift(make("p", found.stack.join(" → "), "quiet"));
  if (incident.editor) {
    const link = make("a", `open ${found.where} in the editor`);
    link.href = incident.editor;
    nodes.push(link);
  }
  return nodes;
}

const list = (texts) => (texts ?? []).map((text) => make("p", text, "quiet"));

function section(place, title, nodes) {
  const found = nodes.filter(Boolean);
  if (found.length) place.append(make("h3", title), ...found);
}

// The first few, and the rest on demand: after a NaN loss every gradient is NaN.
function tensors(facts, what = "tensor") {
  if (!facts.length) return null;
  const listed = (some) => table([what, "shape", "dtype", "NaN", "+Inf", "−Inf", "finite from", "to", "first bad"], some.map((f) => [
    f.name, `[${f.shape.join(", ")}]`, f.dtype, show(f.nan), show(f.posinf), show(f.neginf), show(number(f.finite_min)),
    show(number(f.finite_max)), f.first_bad ? `[${f.first_bad.join(", ")}]` : "",
  ]));
  if (facts.length <= FEW + 2) return listed(facts);
  const box = make("div"), rest = make("details");
  rest.append(make("summary", `${show(facts.length - FEW)} more`), listed(facts.slice(FEW)));
  box.append(listed(facts.slice(0, FEW)), rest);
  return box;
}

function readings(recent) {
  if (!recent.length) return null;
  const scaled = recent.some((r) => r.scale !== null);
  return table(["step before", "loss", "gradient norm", "lr", ...(scaled ? ["scale"] : [])], recent.slice(-6).map((r) => [
    show(r.step), show(number(r.loss)), show(number(r.grad_norm)), show(number(r.lr)), ...(scaled ? [show(number(r.scale))] : []),
  ]));
}

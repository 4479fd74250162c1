// The page: runs, charts, and what is new.

import { Chart } from "./chart.js";
import { detail, Incidents } from "./incident.js";
import { Layers } from "./layers.js";
import { readLink, writeLink } from "./link.js";
import { copy, make } from "./make.js";
import { compare, events, parted, states, summary, waited, worst } from "./panel.js";
import { clock, Curve, kindOf } from "./series.js";
import { Inlined, number, Server } from "./source.js";

const COLOURS = ["#2f6fd0", "#d97706", "#159267", "#9b4fd1", "#c2447e", "#5b6673", "#0e9aa7", "#8a5a2b", "#6b8e23", "#e0567a", "#4b4fb8", "#a08c00"];
const ORDER = ["loss", "component", "grad_norm", "lr", "loss_scale", "eval"];
const HIDDEN = ["time", "epoch", "skipped"]; // drawn as an axis or as marks
const FILLER = ["update", "seconds", "forecast", "unmoved", "g2_over_v"]; // of the guard's own log: they tell nothing as curves
const RISKY = 0.65; // as forecast.WARN
const CHARTS = 40;
const byId = (id) => document.getElementById(id);

class Run {
  constructor(told, number) {
    Object.assign(this, told);
    this.colour = COLOURS[number % COLOURS.length];
    this.shown = true;
    this.curves = new Map();
    this.row = 0;
  }

  take(points) {
    this.curves = new Map(points.columns.map((column) => [column.name, new Curve(column)]));
    this.row = points.row;
  }

  first(role) {
    return [...this.curves.values()].find((curve) => curve.role === role && !curve.layer);
  }

  loss() {
    return this.first("loss") ?? this.first("component");
  }

  lastStep() {
    return this.segments.length ? this.segments[this.segments.length - 1][1] : null;
  }

  clock() {
    return clock(this.first("time"));
  }
}

class App {
  constructor(source) {
    this.source = source;
    this.runs = [];
    this.charts = new Map();
    const given = readLink();
    this.view = { logarithmic: given.logarithmic, weight: given.weight, byTime: given.byTime };
    this.zoomed = given.zoomed;
    this.pinned = given.pinned;
    this.find = given.find;
    this.given = given;
    this.opened = "";
    this.incidents = new Incidents({ list: byId("incidents"), filters: byId("filters"), strip: byId("timeline") }, (run, incident) => this.open(run, incident));
    this.incidents.changed = () => this.incidents.draw(this.shown(), this.extent());
    this.layers = new Layers(byId("layers"), () => this.layers.draw(this.shown(), this.steps()));
  }

  dark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  shown() {
    return this.runs.filter((run) => run.shown);
  }

  async start() {
    this.runs = (await this.source.runs()).map((told, i) => new Run(told, i));
    for (const run of this.runs) run.shown = !this.given.hidden.includes(run.name);
    await Promise.all(this.runs.map(async (run) => run.take(await this.source.points(run.id))));
    document.title = `${this.runs.map((run) => run.name).join(", ")} · nanproof`;
    this.tools();
    this.draw();
    document.body.dataset.ready = "yes";
    this.source.listen((news) => this.hear(news), (state) => { byId("status").textContent = state; });
    const [run, incident] = this.runs.flatMap((r) => r.incidents.map((i) => [r, i])).find(([, i]) => i.id === this.given.incident) ?? [];
    for (const one of worst(this.runs, true)) await this.learn(one);
    this.compared = this.runs.length === 2 ? await this.source.compared().catch(() => null) : null;
    parted(byId("parted"), this.compared, this.runs);
    document.body.dataset.facts = "yes";
    if (run) await this.open(run, incident);
    else if (this.zoomed && !this.view.byTime) await this.refine();
  }

  // Cause, repair and settings take longer to find than points: they come when the page is there already.
  async learn(run) {
    const began = Date.now();
    const waiting = setInterval(() => waited(run, (Date.now() - began) / 1000), 1000);
    run.facts = await this.source.facts(run.id).catch(() => ({})); // the server has ended: the page stays as it is
    clearInterval(waiting);
    this.heads();
  }

  heads() {
    states(byId("states"), this.runs);
    compare(byId("table"), this.runs, (run) => this.toggle(run));
  }

  toggle(run) {
    run.shown = !run.shown;
    this.draw();
  }

  togglePin(name) {
    this.pinned = this.pinned.includes(name) ? this.pinned.filter((n) => n !== name) : [...this.pinned, name];
    this.draw();
  }

  tools() {
    const toggle = (id, on, change) => {
      byId(id).setAttribute("aria-pressed", String(on));
      byId(id).addEventListener("click", () => {
        const pressed = byId(id).getAttribute("aria-pressed") !== "true";
        byId(id).setAttribute("aria-pressed", String(pressed));
        change(pressed);
        this.draw();
      });
    };
    toggle("logy", this.view.logarithmic, (on) => { this.view.logarithmic = on; });
    toggle("axis", this.view.byTime, (on) => { this.view.byTime = on; this.zoomed = null; });
    byId("axis").hidden = !this.runs.every((run) => run.clock());
    if (byId("axis").hidden) this.view.byTime = false;
    byId("smooth").value = String(this.view.weight);
    byId("smooth").addEventListener("input", (event) => { this.view.weight = Number(event.target.value); this.draw(); });
    byId("find").value = this.find;
    byId("find").addEventListener("input", (event) => { this.find = event.target.value; this.draw(); });
    byId("reset").addEventListener("click", () => this.reset());
    byId("share").addEventListener("click", () => copy(location.href, byId("share")));
    byId("theme").addEventListener("click", () => {
      document.documentElement.dataset.theme = this.dark() ? "light" : "dark";
      this.draw();
    });
    byId("detail").addEventListener("close", () => { this.opened = ""; this.link(); });
  }

  link() {
    const hidden = this.runs.filter((run) => !run.shown).map((run) => run.name);
    writeLink({ ...this.view, hidden, pinned: this.pinned, find: this.find, zoomed: this.zoomed, incident: this.opened });
  }

  // Charts: pinned ones first, then losses, norms, rates, and the rest by name.
  draw() {
    const wanted = new Map();
    for (const run of this.runs) {
      for (const curve of run.curves.values()) {
        if (HIDDEN.includes(curve.role) || (curve.layer && !run.curves.has(`forecast/${curve.name}`)) || (run.guarded && FILLER.includes(curve.name.split("/")[0])) || curve.name.startsWith("forecast/")) continue;
        if (!wanted.has(curve.name)) wanted.set(curve.name, { role: curve.role, entries: [] });
        if (run.shown) wanted.get(curve.name).entries.push({ label: run.name, colour: run.colour, curve, time: run.clock(), run, forecast: run.curves.get(`forecast/${curve.name}`) });
      }
    }
    const sought = this.find.trim().toLowerCase();
    const rank = ([name, { role }]) => [this.pinned.includes(name) ? 0 : 1, ORDER.indexOf(role) < 0 ? ORDER.length : ORDER.indexOf(role), name];
    const sorted = [...wanted.entries()].filter(([name]) => !sought || name.toLowerCase().includes(sought) || this.pinned.includes(name));
    sorted.sort((a, b) => { const [x, y] = [rank(a), rank(b)]; return x[0] - y[0] || x[1] - y[1] || x[2].localeCompare(y[2]); });
    const left = Math.max(0, sorted.length - CHARTS);
    sorted.length = Math.min(sorted.length, CHARTS);
    const names = new Set(sorted.map(([name]) => name));
    for (const [name, chart] of this.charts) if (!names.has(name)) { chart.figure.remove(); chart.plot?.destroy(); this.charts.delete(name); }
    const place = byId("charts");
    place.querySelector(".none")?.remove();
    sorted.forEach(([name, { entries }], i) => {
      if (!this.charts.has(name)) this.charts.set(name, new Chart(name, this));
      const { figure } = this.charts.get(name);
      if (place.children[i] !== figure) place.insertBefore(figure, place.children[i] ?? null);
      this.charts.get(name).draw(entries, i === 0, this.pinned.includes(name));
    });
    if (!sorted.length) place.append(make("p", wanted.size ? `No metric matches “${this.find}”.` : "No values yet; they appear as they are logged.", "none quiet"));
    if (left) place.append(make("p", `and ${left} more: find one by its name above`, "none quiet"));
    this.heads();
    const shown = this.shown();
    summary(byId("summary"), shown);
    this.incidents.draw(shown, this.extent());
    events(byId("said"), byId("events"), shown);
    this.layers.draw(shown, this.steps());
    this.link();
  }

  // Every logged step of the shown runs, whether its values are finite or not.
  extent(byTime = this.view.byTime) {
    const all = (this.shown().length ? this.shown() : this.runs).flatMap((run) => {
      const place = this.place(run, byTime);
      const ahead = [...run.curves.values()].filter((curve) => curve.name.startsWith("forecast/")).flatMap((curve) => curve.parts.flatMap(([steps]) => [...steps.slice(-1)]));
      return [...run.segments.flat(), ...(byTime ? [] : ahead)].map(place);
    });
    const min = all.reduce((a, b) => Math.min(a, b), Infinity), max = all.reduce((a, b) => Math.max(a, b), -Infinity);
    return Number.isFinite(min) ? { min, max: max > min ? max : min + 1 } : { min: 0, max: 1 };
  }

  // The same in steps, whatever the axis shows.
  steps() {
    return !this.view.byTime && this.zoomed ? this.zoomed : this.extent(false);
  }

  place(run, byTime = this.view.byTime) {
    const time = byTime ? run.clock() : null;
    return time ?? ((step) => step);
  }

  marksOf(entries) {
    const bands = [], lines = [];
    let row = -1; // a line of labels for each run that has some
    entries.forEach(({ curve, run }) => {
      const place = this.place(run), before = bands.length;
      row += 1;
      const add = (stretch, own, what) => bands.push({
        from: place(stretch[0]), to: place(stretch[1]), colour: run.colour, own, row,
        label: `${what}${kindOf(stretch)} ${stretch[0].toLocaleString("en")}${stretch[1] > stretch[0] ? `–${stretch[1].toLocaleString("en")}` : ""}`,
      });
      for (const stretch of curve.bad) add(stretch, true, "");
      const loss = run.loss();
      if (loss && loss !== curve && !curve.bad.length) for (const stretch of loss.bad) add(stretch, false, `${loss.name} `);
      bands.push(...this.risks(run, place, row));
      if (bands.length === before) row -= 1;
      for (const event of run.events) {
        if (event.step === null || event.step === undefined) continue;
        const kind = { skip: "skip", overflow: "skip", rollback: "rollback", resume: "resume" }[event.kind];
        if (kind) lines.push({ at: place(event.step), kind });
      }
      run.segments.slice(1).forEach(([first]) => lines.push({ at: place(first), kind: "resume" }));
      for (const incident of run.incidents) lines.push({ at: place(incident.step), kind: incident.action === "rollback" ? "rollback" : "incident" });
    });
    return { bands, lines };
  }

  // Where the forecast warned: the risk column above its limit.
  risks(run, place, row) {
    const curve = run.curves.get("risk");
    if (!curve) return [];
    const found = [];
    for (const [steps, values] of curve.parts) {
      let from = null, most = 0;
      steps.forEach((step, i) => {
        if (values[i] >= RISKY) { from ??= step; most = Math.max(most, values[i]); }
        if (from !== null && (values[i] < RISKY || i === steps.length - 1)) {
          found.push({ from: place(from), to: place(step), colour: "#d98a00", own: false, row, label: `risk ${most.toFixed(2)}` });
          from = null;
          most = 0;
        }
      });
    }
    return found;
  }

  zoom(min, max) {
    this.zoomed = { min, max };
    for (const chart of this.charts.values()) chart.plot?.setScale("x", { min, max });
    this.link();
    clearTimeout(this.waiting);
    if (!this.view.byTime) this.waiting = setTimeout(() => this.refine(), 120);
  }

  // Ask for finer points of what is on the screen.
  async refine() {
    const range = this.zoomed;
    const finer = await Promise.all(this.runs.map((run) => (range ? this.source.points(run.id, range.min, range.max) : this.source.points(run.id))));
    if (range !== this.zoomed) return;
    this.runs.forEach((run, i) => run.take(finer[i]));
    this.draw();
  }

  reset() {
    this.zoomed = null;
    this.refine();
  }

  // A run that began below a watched folder.
  async begin(told) {
    if (this.runs.some((run) => run.id === told.id)) return;
    const run = new Run(told, this.runs.length);
    this.runs.push(run);
    run.take(await this.source.points(run.id));
    this.draw();
    await this.learn(run);
  }

  hear(news) {
    if (news.began) this.begin(news.began);
    const run = this.runs.find((r) => r.id === news.run);
    if (!run) return;
    if (news.since > run.row && !run.missing) {
      run.missing = true; // something was told before this page listened
      this.source.points(run.id).then((points) => { run.take(points); run.missing = false; this.draw(); });
    }
    const was = run.state.kind;
    for (const incident of news.incidents) {
      const known = run.incidents.findIndex(({ id }) => id === incident.id);
      run.incidents.splice(known < 0 ? run.incidents.length : known, 1, incident);
    }
    Object.assign(run, { state: news.state, segments: news.segments });
    if (news.row > run.row) {
      run.row = news.row;
      for (const name of [...run.curves.keys()]) if (name.startsWith("forecast/")) run.curves.delete(name);
      for (const [name, column] of Object.entries(news.columns)) {
        if (run.curves.has(name)) run.curves.get(name).append(column);
        else run.curves.set(name, new Curve({ ...column, name, last: number(column.last), lengths: [column.steps.length], total: 0, steps: Float64Array.from(column.steps), values: Float64Array.from(column.values) }));
      }
      run.events.push(...news.events);
      for (const event of news.events) run.counts[event.kind] = (run.counts[event.kind] ?? 0) + 1;
    }
    if (run.state.kind !== was || news.incidents.length) {
      clearTimeout(run.asking);
      run.asking = setTimeout(() => this.learn(run), 1000);
    }
    clearTimeout(this.drawing);
    this.drawing = setTimeout(() => this.draw(), 30);
  }

  async open(run, incident) {
    detail(byId("incident"), await this.source.incident(run.id, incident.id), run.facts?.why, this.runs.length > 1 ? run.name : "");
    this.opened = incident.id;
    this.link();
    if (!byId("detail").open) byId("detail").showModal();
    byId("detail").querySelector("h2").focus(); // not the first table that scrolls
    byId("detail").scrollTop = 0;
  }
}

const inlined = byId("data");
const app = new App(inlined ? new Inlined(JSON.parse(inlined.textContent)) : new Server());
app.start().catch((error) => { byId("status").textContent = `the page could not start: ${error}`; });

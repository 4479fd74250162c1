// The page: runs, charts, and what is new.

import { Chart } from "./chart.js";
import { detail, events, incidents, make, summary } from "./panel.js";
import { clock, Curve } from "./series.js";
import { Inlined, number, Server } from "./source.js";

const COLOURS = ["#2f6fd0", "#d97706", "#159267", "#9b4fd1", "#c2447e", "#5b6673"];
const ORDER = ["loss", "component", "grad_norm", "lr", "loss_scale", "eval"];
const HIDDEN = ["time", "epoch", "skipped"]; // drawn as an axis or as marks
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
    return [...this.curves.values()].find((curve) => curve.role === role);
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
    this.view = { logarithmic: false, weight: 0, byTime: false };
    this.zoomed = null;
    this.waiting = 0;
  }

  dark() {
    const chosen = document.documentElement.dataset.theme;
    return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  async start() {
    this.runs = (await this.source.runs()).map((told, i) => new Run(told, i));
    await Promise.all(this.runs.map(async (run) => run.take(await this.source.points(run.id))));
    this.buttons();
    this.tools();
    this.alarm();
    this.draw();
    document.body.dataset.ready = "yes";
    this.source.listen((news) => this.hear(news), (state) => { byId("status").textContent = state; });
  }

  buttons() {
    byId("runs").replaceChildren(...this.runs.map((run) => {
      const button = make("button", undefined, "run");
      const dot = make("span", undefined, "dot");
      dot.style.background = run.colour;
      button.type = "button";
      button.append(dot, make("span", run.name));
      button.title = run.name;
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        run.shown = !run.shown;
        button.setAttribute("aria-pressed", String(run.shown));
        this.draw();
      });
      return button;
    }));
    document.title = `${this.runs.map((run) => run.name).join(", ")} · nanproof`;
  }

  tools() {
    const toggle = (id, change) => byId(id).addEventListener("click", () => {
      const pressed = byId(id).getAttribute("aria-pressed") !== "true";
      byId(id).setAttribute("aria-pressed", String(pressed));
      change(pressed);
      this.draw();
    });
    toggle("logy", (on) => { this.view.logarithmic = on; });
    toggle("axis", (on) => { this.view.byTime = on; this.zoomed = null; });
    byId("axis").hidden = !this.runs.every((run) => run.clock());
    byId("smooth").addEventListener("input", (event) => { this.view.weight = Number(event.target.value); this.draw(); });
    byId("reset").addEventListener("click", () => this.reset());
    byId("theme").addEventListener("click", () => {
      document.documentElement.dataset.theme = this.dark() ? "light" : "dark";
      this.draw();
    });
  }

  // Charts: one for each loss-like quantity, small ones for the rest; several components share one.
  draw() {
    const shown = this.runs.filter((run) => run.shown);
    const wanted = new Map();
    for (const run of this.runs) {
      for (const curve of run.curves.values()) {
        if (HIDDEN.includes(curve.role)) continue;
        if (!wanted.has(curve.name)) wanted.set(curve.name, { role: curve.role, entries: [] });
        if (run.shown) wanted.get(curve.name).entries.push({ label: run.name, colour: run.colour, curve, time: run.clock(), run });
      }
    }
    const rank = ([name, { role }]) => { const i = ORDER.indexOf(role); return [i < 0 ? ORDER.length : i, name]; };
    const sorted = [...wanted.entries()].sort((a, b) => { const [x, y] = [rank(a), rank(b)]; return x[0] - y[0] || x[1].localeCompare(y[1]); }).slice(0, 40);
    const names = new Set(sorted.map(([name]) => name));
    for (const [name, chart] of this.charts) if (!names.has(name)) { chart.figure.remove(); this.charts.delete(name); }
    sorted.forEach(([name, { entries }], i) => {
      if (!this.charts.has(name)) {
        const chart = new Chart(name, i === 0, this);
        this.charts.set(name, chart);
        byId("charts").append(chart.figure);
      }
      this.charts.get(name).draw(entries);
    });
    if (!sorted.length && !byId("charts").childElementCount) byId("charts").append(make("p", "No values yet; they appear as they are logged.", "quiet"));
    summary(byId("summary"), shown);
    incidents(byId("incidents"), shown, (run, incident) => this.open(run, incident));
    events(byId("events"), shown);
  }

  marksOf(entries) {
    const bad = [], lines = [];
    for (const { curve, run, time } of entries) {
      const place = (step) => (this.view.byTime && time ? time(step) : step);
      for (const [from, to] of curve.bad) bad.push([place(from), place(to)]);
      for (const event of run.events) {
        if (event.step === null || event.step === undefined) continue;
        const kind = { skip: "skip", overflow: "skip", rollback: "rollback", resume: "resume" }[event.kind];
        if (kind) lines.push({ at: place(event.step), kind });
      }
      run.segments.slice(1).forEach(([first]) => lines.push({ at: place(first), kind: "resume" }));
      for (const incident of run.incidents) lines.push({ at: place(incident.step), kind: incident.action === "rollback" ? "rollback" : "incident" });
    }
    return { bad, lines };
  }

  zoom(min, max) {
    this.zoomed = { min, max };
    for (const chart of this.charts.values()) chart.plot?.setScale("x", { min, max });
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
    for (const chart of this.charts.values()) chart.shape = "";
    this.refine();
  }

  hear(news) {
    const run = this.runs.find((r) => r.id === news.run);
    if (!run) return;
    run.incidents.push(...news.incidents);
    if (news.row > run.row) {
      run.row = news.row;
      for (const [name, column] of Object.entries(news.columns)) {
        if (run.curves.has(name)) run.curves.get(name).append(column);
        else run.curves.set(name, new Curve({ ...column, name, last: number(column.last), lengths: [column.steps.length], total: 0, steps: Float64Array.from(column.steps), values: Float64Array.from(column.values) }));
      }
      run.events.push(...news.events);
      for (const event of news.events) run.counts[event.kind] = (run.counts[event.kind] ?? 0) + 1;
    }
    this.alarm(run, news);
    clearTimeout(this.drawing);
    this.drawing = setTimeout(() => this.draw(), 30);
  }

  alarm() {
    const sick = this.runs.filter((run) => {
      const loss = run.first("loss") ?? run.first("component");
      const norm = run.first("grad_norm");
      return [loss, norm].some((curve) => curve && !Number.isFinite(curve.last));
    });
    byId("alarm").hidden = !sick.length;
    byId("alarm").textContent = sick.map((run) => `${run.name}: not finite at the last step that was logged`).join("   ");
  }

  async open(run, incident) {
    detail(byId("incident"), await this.source.incident(run.id, incident.id));
    byId("detail").showModal();
    byId("detail").scrollTop = 0;
  }
}

const inlined = byId("data");
const app = new App(inlined ? new Inlined(JSON.parse(inlined.textContent)) : new Server());
app.start().catch((error) => { byId("status").textContent = `the page could not start: ${error}`; });

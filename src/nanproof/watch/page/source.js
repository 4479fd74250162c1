// Where the page gets its data: a server that is asked and listened to, or the file that the page itself is.

const WORDS = { NaN: NaN, Infinity: Infinity, "-Infinity": -Infinity };

export function number(value) {
  return typeof value === "string" ? WORDS[value] : value;
}

export function decode(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  let at = 4 + size;
  const columns = header.columns.map((column) => {
    const steps = new Float64Array(buffer, at, column.points);
    at += 8 * column.points;
    const values = new Float64Array(buffer, at, column.points);
    at += 8 * column.points;
    return { ...column, last: number(column.last), steps, values };
  });
  return { row: header.row, columns };
}

export class Server {
  async runs() {
    return (await fetch("runs")).json();
  }

  async points(run, low, high) {
    const range = low === undefined ? "" : `?low=${low}&high=${high}`;
    return decode(await (await fetch(`points/${run}${range}`)).arrayBuffer());
  }

  async incident(run, key) {
    return (await fetch(`incident/${run}/${key}`)).json();
  }

  async facts(run) {
    return (await fetch(`facts/${run}`)).json();
  }

  async compared() {
    return (await fetch("compared")).json();
  }

  listen(hear, state) {
    const stream = new EventSource("stream");
    stream.onopen = () => state("live");
    stream.onerror = () => state("connection lost; trying again");
    stream.onmessage = (message) => hear(JSON.parse(message.data));
  }
}

export class Inlined {
  constructor(data) {
    this.data = data;
  }

  async runs() {
    return this.data.runs;
  }

  async points(run) {
    const bytes = Uint8Array.from(atob(this.data.points[run]), (c) => c.charCodeAt(0));
    return decode(bytes.buffer);
  }

  async incident(run, key) {
    return this.data.incidents[key];
  }

  async facts(run) {
    return this.data.facts[run];
  }

  async compared() {
    return this.data.compared;
  }

  listen(hear, state) {
    state(this.data.note);
  }
}

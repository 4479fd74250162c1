// The view in the address: runs, metrics, zoom and the open incident, so that a colleague sees the same.

export function readLink() {
  const given = new URLSearchParams(location.hash.slice(1));
  const list = (key) => (given.get(key) ? given.get(key).split(",").map(decodeURIComponent) : []);
  const [low, high] = list("zoom").map(Number);
  return {
    hidden: list("hide"),
    pinned: list("pin"),
    find: given.get("find") ?? "",
    zoomed: Number.isFinite(low) && Number.isFinite(high) && low < high ? { min: low, max: high } : null,
    logarithmic: given.get("log") === "1",
    byTime: given.get("time") === "1",
    weight: Math.min(0.98, Math.max(0, Number(given.get("smooth")) || 0)),
    incident: given.get("incident") ?? "",
  };
}

export function writeLink({ hidden, pinned, find, zoomed, logarithmic, byTime, weight, incident }) {
  const wanted = new URLSearchParams();
  const list = (key, values) => values.length && wanted.set(key, values.map(encodeURIComponent).join(","));
  list("hide", hidden);
  list("pin", pinned);
  if (find) wanted.set("find", find);
  if (zoomed) wanted.set("zoom", `${Number(zoomed.min.toPrecision(9))},${Number(zoomed.max.toPrecision(9))}`);
  if (logarithmic) wanted.set("log", "1");
  if (byTime) wanted.set("time", "1");
  if (weight) wanted.set("smooth", String(weight));
  if (incident) wanted.set("incident", incident);
  const hash = wanted.toString();
  if (hash !== location.hash.slice(1)) history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
}

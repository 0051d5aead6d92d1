// Keeps the status page up to date: asks for status.json and history.json, and puts in what they say, as text only.
//
// It decides no name and no format of a figure: `api/page.py` does. Without an answer it keeps the last picture, says
// since when, and goes on asking. It sends nothing but GET requests to where the page came from.

/* global uPlot */

const POLL_MS = 2000;
const POLL_HIDDEN_MS = 15000; // in a hidden tab, for its title
const POLL_LOST_MS = 5000;
const TIMEOUT_MS = 5000;
const POINTS_MAX = 4000; // then the coordinator's thinned history is taken again
const PLOT_HEIGHT = 190;
const LINES = ["--line-1", "--line-2"];
const DASHES = [undefined, [6, 4]];
const TICKS_S = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800];

const byId = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");
const counts = new Intl.NumberFormat("en");
const numbers = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

let history = null; // what history.json said last, with all points since the first
let plots = []; // { uplot, box, legend, lines }
let drawn = ""; // the description of the plots that are drawn
let answeredAt = null;
let over = false; // the job is done or has failed: its coordinator may leave

// --- asking ---

async function ask(path) {
  const abort = new AbortController();
  const timer = setTimeout(() => abort.abort(), TIMEOUT_MS);
  try {
    const answer = await fetch(path, { signal: abort.signal, cache: "no-store", redirect: "error" });
    if (!answer.ok) throw new Error(`HTTP status ${answer.status}`);
    return await answer.json();
  } catch (error) {
    throw abort.signal.aborted ? new Error(`no answer within ${TIMEOUT_MS / 1000} s`) : error;
  } finally {
    clearTimeout(timer);
  }
}

async function askHistory() {
  const known = history && history.columns.elapsed_s.length < POINTS_MAX ? history.last : 0;
  const told = await ask(`history.json?since=${known}`);
  const continues =
    known > 0 &&
    told.run_id === history.run_id &&
    told.coordinator === history.coordinator &&
    told.last >= known &&
    JSON.stringify(told.plots) === JSON.stringify(history.plots);
  if (known > 0 && !continues) return ask("history.json?since=0");
  if (continues) told.columns = joined(history.columns, told.columns);
  return told;
}

// The points of both; a later coordinator's replace those at their time and after it.
function joined(columns, added) {
  const from = added.elapsed_s.length ? added.elapsed_s[0] : Infinity;
  let kept = columns.elapsed_s.length;
  while (kept > 0 && columns.elapsed_s[kept - 1] >= from) kept -= 1;
  const both = {};
  for (const name of Object.keys(added)) both[name] = columns[name].slice(0, kept).concat(added[name]);
  return both;
}

let timer = 0;
let asking = false;

async function look() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  let pause = document.hidden ? POLL_HIDDEN_MS : POLL_MS;
  try {
    const [status, points] = await Promise.all([ask("status.json"), askHistory()]);
    answeredAt = new Date();
    showStatus(status);
    history = points;
    showHistory();
    byId("contact").hidden = true;
    byId("updated").textContent = `as of ${answeredAt.toLocaleTimeString()}`;
  } catch (error) {
    pause = Math.max(pause, POLL_LOST_MS);
    showLost(error);
  } finally {
    asking = false;
    timer = setTimeout(look, pause);
  }
}

function showLost(error) {
  const since = answeredAt ? `since ${answeredAt.toLocaleTimeString()}` : "since this page was opened";
  const end = over ? "The job is over." : "It may have ended with its run; this page goes on if it answers again.";
  const text = `The coordinator has not answered ${since}; below is what it said last. ${end} (${error.message})`;
  setText(byId("contact"), text);
  byId("contact").hidden = false;
}

// --- texts and tables ---

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Gives an element as many children as there are items, and has each one filled.
function fill(parent, items, make, put) {
  while (parent.children.length > items.length) parent.lastElementChild.remove();
  while (parent.children.length < items.length) parent.append(make());
  items.forEach((item, index) => put(parent.children[index], item, index));
}

function element(tag, ...children) {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
}

function showStatus(status) {
  const screen = status.screen;
  over = ["JOB_STATE_DONE", "JOB_STATE_FAILED"].includes(status.state);
  document.title = screen.title;
  setText(byId("heading"), screen.heading);
  setText(byId("reason"), screen.reason);
  [byId("progress").value, byId("progress").max] = screen.progress;
  const item = () => element("li");
  fill(byId("problems"), screen.problems, item, setText);
  fill(byId("events"), screen.events, item, setText);
  const figure = () => element("div", element("dt"), element("dd"));
  fill(byId("figures"), screen.figures, figure, (place, pair) => pair.forEach((text, i) => setText(place.children[i], text)));
  showTable(byId("workers"), screen.workers);
  showTable(byId("shards"), screen.shards);
  showTable(byId("tables"), screen.tables);
  byId("tables-section").hidden = screen.tables.rows.length === 0;
}

function showTable(table, { titles, is_text, rows, live }) {
  const kind = (cell, text, column) => {
    cell.className = is_text[column] ? "text" : "";
    setText(cell, text);
  };
  const header = () => {
    const cell = element("th");
    cell.scope = "col";
    return cell;
  };
  const row = () => {
    const first = element("th");
    first.scope = "row";
    return element("tr", first);
  };
  fill(table.tHead.rows[0], titles, header, kind);
  fill(table.tBodies[0], rows, row, (place, cells, index) => {
    place.className = live[index] ? "" : "down";
    fill(place, cells, () => element("td"), kind);
  });
}

// --- plots ---

function inFigures(value) {
  if (value === null || value === undefined) return "-";
  if (Number.isInteger(value)) return counts.format(value);
  return Math.abs(value) < 1e-3 ? value.toExponential(2) : numbers.format(value);
}

function inWords(seconds) {
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${+(seconds / 60).toFixed(1)} min`;
  return seconds < 172800 ? `${+(seconds / 3600).toFixed(1)} h` : `${+(seconds / 86400).toFixed(1)} d`;
}

function showHistory() {
  byId("plots").hidden = false;
  byId("incomplete").hidden = history.complete;
  setText(byId("incomplete"), `This coordinator has no history of the job before ${history.begins}.`);
  const description = JSON.stringify(history.plots);
  if (description !== drawn) {
    plots.forEach((plot) => plot.uplot.destroy());
    byId("grid").replaceChildren();
    plots = history.plots.map(newPlot);
    drawn = description;
  }
  for (const plot of plots) {
    plot.uplot.setData([history.columns.elapsed_s, ...plot.lines.map((line) => history.columns[line.column])]);
    showLegend(plot);
  }
}

function redraw() {
  drawn = "";
  if (history) showHistory();
}

function shownSpan(uplot, from, to) {
  if (from === null || from === undefined) return [0, 1];
  const span = Number(byId("span").value);
  const begin = span ? Math.max(from, to - span) : from;
  return begin < to ? [begin, to] : [begin, begin + 1];
}

function newPlot({ title, lines, from_zero, stepped }) {
  const legend = lines.map((_, index) => {
    const text = element("span");
    text.className = `line-${index + 1}`;
    return text;
  });
  const name = element("b");
  name.textContent = title;
  const box = element("div");
  box.className = "plot";
  box.setAttribute("role", "img");
  byId("grid").append(element("figure", element("figcaption", name, ...legend), box));
  const style = getComputedStyle(document.documentElement);
  const color = (variable) => style.getPropertyValue(variable).trim();
  const axis = { stroke: color("--quiet"), grid: { stroke: color("--rule"), width: 1 }, ticks: { show: false } };
  const plot = { box, legend, lines, title };
  const options = {
    width: box.clientWidth,
    height: PLOT_HEIGHT,
    legend: { show: false },
    cursor: { sync: { key: "time" }, y: false, points: { size: 6 } },
    scales: {
      x: { time: false, range: shownSpan },
      y: { range: { min: from_zero ? { pad: 0, hard: 0, soft: 0, mode: 1 } : { pad: 0.1 }, max: { pad: 0.1, soft: 1, mode: from_zero ? 1 : 0 } } },
    },
    axes: [
      { ...axis, incrs: TICKS_S, space: 70, size: 30, values: (_, ticks) => ticks.map(inWords) },
      { ...axis, size: 52, values: (_, ticks) => ticks.map((tick) => short.format(tick)) },
    ],
    series: [
      {},
      ...lines.map((_, index) => ({
        stroke: color(LINES[index % LINES.length]),
        dash: DASHES[index % DASHES.length],
        width: 2,
        points: { show: false },
        paths: stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
      })),
    ],
    hooks: { setCursor: [() => plot.uplot && showLegend(plot)] },
  };
  plot.uplot = new uPlot(options, [[], ...lines.map(() => [])], box);
  return plot;
}

// The values under the cursor, without one the newest.
function showLegend({ uplot, box, legend, lines, title }) {
  const at = uplot.cursor.idx ?? uplot.data[0].length - 1;
  lines.forEach((line, index) => {
    const value = at < 0 ? null : uplot.data[index + 1][at];
    setText(legend[index], `${line.name} ${inFigures(value)}`);
  });
  const time = at < 0 ? "nothing yet" : `after ${inWords(Math.round(uplot.data[0][at]))}`;
  box.setAttribute("aria-label", `plot of ${title}, ${time}: ${legend.map((text) => text.textContent).join(", ")}`);
}

new ResizeObserver(() => {
  for (const { uplot, box } of plots) {
    if (box.clientWidth !== uplot.width) uplot.setSize({ width: box.clientWidth, height: PLOT_HEIGHT });
  }
}).observe(byId("grid"));
dark.addEventListener("change", redraw);
byId("span").addEventListener("change", () => history && showHistory());
document.addEventListener("visibilitychange", () => document.hidden || look());
look();

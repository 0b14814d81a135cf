// Keeps a page up to date, counts its seconds, and gives it keys. Everything can be read without it.
"use strict";

(() => {
  const live = document.getElementById("live");
  const connection = document.getElementById("connection");
  const told = new Map(); // what the server last sent for each part, to the letter
  let toldAt = performance.now();
  let stream = null;
  let pressed = false; // a button of the mouse, or a finger: what is under it must not be replaced, or nothing is clicked
  let kept = null; // the news that came meanwhile

  // -- news ---------------------------------------------------------------------------------------------------------

  function listen() {
    if (stream) stream.close();
    stream = new EventSource(live.dataset.events);
    stream.addEventListener("page", (event) => show(event.data));
    stream.addEventListener("open", () => say(""));
    stream.addEventListener("error", () =>
      say(
        stream.readyState === EventSource.CLOSED
          ? "This page is no longer kept up to date: load it again."
          : "The connection to pglease web is lost; trying again …",
      ),
    );
  }

  function say(text) {
    if (connection.textContent !== text) connection.textContent = text;
  }

  function show(html) {
    kept = pressed ? html : null;
    if (pressed) return;
    count(); // what is left alone below goes on from here
    toldAt = performance.now();
    const parts = new DOMParser().parseFromString(html, "text/html").body.children;
    for (const part of [...parts]) {
      const text = part.outerHTML;
      const old = document.getElementById(part.id);
      if (!old || text === told.get(part.id) || old.querySelector("[data-stays][open]")) continue;
      told.set(part.id, text);
      const key = old.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
      old.replaceWith(part);
      if (key !== undefined) part.querySelector(`[data-key="${CSS.escape(key)}"]`)?.focus({ preventScroll: true });
    }
    count();
  }

  function press(down) {
    pressed = down;
    if (!down) setTimeout(() => kept !== null && show(kept)); // after the click that this may be the end of
  }

  // -- seconds ------------------------------------------------------------------------------------------------------

  // Durations as the server writes them.
  function duration(seconds) {
    if (seconds < 10) return `${seconds.toFixed(1)} s`;
    const whole = Math.round(seconds);
    const units = [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]];
    for (const [unit, size, lower, part] of units) {
      if (whole < size) continue;
      const rest = Math.floor((whole % size) / part);
      return `${Math.floor(whole / size)} ${unit}` + (rest ? ` ${rest} ${lower}` : "");
    }
    return `${whole} s`;
  }

  // Each number counts from when it came: `since` is that moment on this browser's own clock.
  function count() {
    const now = performance.now();
    for (const each of document.querySelectorAll("[data-left], [data-ago]")) {
      each.since ??= toldAt;
      const passed = (now - each.since) / 1000;
      if (each.dataset.ago !== undefined) each.textContent = duration(Number(each.dataset.ago) + passed);
      if (each.dataset.left === undefined) continue;
      const left = Math.max(0, Number(each.dataset.left) - passed);
      each.textContent = duration(left);
      if (each.nextElementSibling?.tagName === "METER") each.nextElementSibling.value = left;
    }
  }

  // -- search -------------------------------------------------------------------------------------------------------

  function searchAsOneTypes(form) {
    let waiting = 0;
    const search = () => {
      const asked = new URLSearchParams(new FormData(form)).toString();
      history.replaceState(null, "", `?${asked}`);
      live.dataset.events = `events?${asked}`;
      listen();
    };
    form.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(search, 200);
    });
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      clearTimeout(waiting);
      search();
    });
  }

  // -- keys ---------------------------------------------------------------------------------------------------------

  function step(by) {
    const links = [...document.querySelectorAll("#leases a[data-key]")];
    const at = links.indexOf(document.activeElement);
    links[at < 0 ? 0 : Math.min(links.length - 1, Math.max(0, at + by))]?.focus();
  }

  const keys = {
    "/": () => document.getElementById("q")?.focus(),
    j: () => step(1),
    k: () => step(-1),
    u: () => document.getElementById("up")?.click(),
    "?": () => {
      const help = document.getElementById("keys");
      help.open = !help.open;
      if (help.open) help.querySelector("summary").focus();
    },
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  });

  if (live) {
    for (const part of live.children) told.set(part.id, part.outerHTML);
    addEventListener("pointerdown", () => press(true));
    for (const end of ["pointerup", "pointercancel", "blur"]) addEventListener(end, () => press(false));
    setInterval(count, 500);
    listen();
    const form = document.getElementById("search");
    if (form) searchAsOneTypes(form);
    // A page that nobody sees asks for nothing, and leaves its connection to others: browsers have few for each host.
    document.addEventListener("visibilitychange", () => (document.hidden ? stream.close() : listen()));
    addEventListener("pagehide", () => stream.close());
    addEventListener("pageshow", (event) => event.persisted && listen());
  }
})();

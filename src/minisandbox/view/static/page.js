"use strict";
// Keyboard, and renewal of a live page. Everything works without this script.
const main = document.getElementById("main");
const help = document.getElementById("help");
const items = () => [...main.querySelectorAll("article.turn, table.list tbody tr")];
let current = -1;

function select(index) {
  const all = items();
  if (!all.length) return;
  all[current]?.classList.remove("current");
  current = Math.max(0, Math.min(index, all.length - 1));
  const item = all[current];
  item.classList.add("current");
  item.scrollIntoView({ block: item.matches("tr") ? "nearest" : "start" });
  if (item.id) {
    history.replaceState(null, "", "#" + item.id);
    item.focus({ preventScroll: true });
  }
}

const follow = (...selectors) => selectors.map((selector) => document.querySelector(selector)).find(Boolean)?.click();
const jump = (id) => select(items().findIndex((item) => item.id === id));
const keys = {
  j: () => select(current + 1),
  k: () => select(current - 1),
  Enter: () => items()[current]?.querySelector("td a")?.click(),
  o: () => items()[current]?.querySelectorAll("details").forEach((details) => (details.open = !details.open)),
  "[": () => follow("[data-before]"),
  "]": () => follow("[data-after]"),
  n: () => follow("[rel=next]"),
  u: () => follow("[data-up]", ".brand"),
  g: () => document.getElementById("grade")?.scrollIntoView(),
  p: () => jump("patch"),
  t: () => jump("tests"),
  "/": () => document.getElementById("filter")?.focus(),
  "?": () => help.showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.target.closest("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "Enter" && event.target.closest("a, button, summary")) return;
  if (keys[event.key]) {
    event.preventDefault();
    keys[event.key]();
  }
});
document.getElementById("help-button").addEventListener("click", () => help.showModal());
current = items().findIndex((item) => item.id && "#" + item.id === location.hash);

// The runs page: the form is sent only if two runs are chosen.
document.getElementById("compare")?.addEventListener("click", (event) => {
  if (main.querySelectorAll("input[name=run]:checked").length === 2) return;
  event.preventDefault();
  event.target.textContent = "Choose two runs first";
});

// A live run: the server reports each change, and the page fetches itself again.
if (main.dataset.events) {
  let busy = false;
  new EventSource(main.dataset.events).addEventListener("change", async () => {
    if (busy || document.activeElement?.id === "filter") return;
    busy = true;
    try {
      const text = await (await fetch(location.href)).text();
      const fresh = new DOMParser().parseFromString(text, "text/html").getElementById("main");
      if (fresh) main.replaceChildren(...fresh.childNodes);
    } finally {
      busy = false;
    }
  });
}

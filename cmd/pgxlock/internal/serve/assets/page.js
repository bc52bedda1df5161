// What the server renders stays true without this script: it only saves reloading.
"use strict";
(() => {
  const page = document.getElementById("page");
  const live = document.getElementById("live");
  const search = document.getElementById("search");
  const box = document.getElementById("q");
  const kind = document.getElementById("kind");
  const dialog = document.getElementById("dialog");
  document.documentElement.classList.add("js");

  let source;
  let waiting = null; // what came while the user was selecting text

  const say = (text, on) => {
    if (live.textContent !== text) live.textContent = text; // it is read aloud
    live.className = on ? "on" : "off";
  };

  const show = (html) => {
    const chosen = document.getSelection();
    if (!chosen.isCollapsed && page.contains(chosen.anchorNode)) {
      waiting = html;
      return;
    }
    waiting = null;
    const focused = page.contains(document.activeElement) ? document.activeElement.id : "";
    const scrolled = [...page.querySelectorAll(".scroll, .canvas")].map((box) => [box.id, box.scrollLeft, box.scrollTop]);
    page.innerHTML = html;
    for (const [id, left, top] of scrolled) {
      document.getElementById(id)?.scrollTo(left, top);
    }
    if (focused) {
      document.getElementById(focused)?.focus({ preventScroll: true });
    }
  };

  let again;
  const connect = () => {
    clearTimeout(again);
    source?.close();
    if (document.hidden) return;
    source = new EventSource("/events" + location.search);
    source.onopen = () => say("live", true);
    source.onerror = async () => {
      say("no connection to pgxlock serve, trying again", false);
      if (source.readyState === EventSource.CLOSED) {
        again = setTimeout(connect, 3000);
        // A session ends after some hours, and with the server.
        const answer = await fetch("/", { method: "HEAD", redirect: "manual" }).catch(() => null);
        if (answer?.type === "opaqueredirect") location.assign("/login");
      }
    };
    source.onmessage = (event) => {
      show(event.data);
      const blind = document.getElementById("cannot");
      say(blind ? "cannot see the server" : "live", !blind);
    };
  };
  // Nobody looks at a hidden tab, and a browser has only six connections to a server.
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) return connect();
    source?.close();
    say("paused", false);
  });

  document.addEventListener("selectionchange", () => {
    if (waiting !== null && document.getSelection().isCollapsed) {
      show(waiting);
    }
  });

  let pause;
  const find = () => {
    clearTimeout(pause);
    const query = new URLSearchParams();
    if (box.value) query.set("q", box.value);
    if (kind.value) query.set("kind", kind.value);
    history.replaceState(null, "", "/" + (query.size ? "?" + query : ""));
    connect();
  };
  search.addEventListener("submit", (event) => {
    event.preventDefault();
    find();
  });
  box.addEventListener("input", () => {
    clearTimeout(pause);
    pause = setTimeout(find, 200);
  });
  kind.addEventListener("change", find);
  const slash = (event) => event.key === "/" && !/^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName);
  document.addEventListener("keydown", (event) => {
    if (slash(event)) event.preventDefault(); // Firefox has a search of its own
  });
  document.addEventListener("keyup", (event) => { // not before: the slash would be typed into the box
    if (slash(event)) {
      box.select();
      box.focus();
    }
  });

  // A form in a dialog: what the server answers replaces it.
  const fill = async (answer) => {
    if (answer.status === 401 || answer.status === 403) {
      location.assign("/login");
      return;
    }
    const form = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("evict");
    if (!form) {
      throw new Error("no form came");
    }
    dialog.replaceChildren(...form.childNodes);
    if (!dialog.open) {
      dialog.showModal();
    }
    (dialog.querySelector("[autofocus]") ?? dialog.querySelector("[data-close]"))?.focus();
  };
  let opener = "";
  page.addEventListener("click", async (event) => {
    const link = event.target.closest("a.evict");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    opener = link.id;
    try {
      await fill(await fetch(link.href));
    } catch {
      location.assign(link.href);
    }
  });
  dialog.addEventListener("click", (event) => {
    if (event.target.closest("[data-close]")) {
      event.preventDefault();
      dialog.close();
    }
  });
  dialog.addEventListener("submit", async (event) => {
    event.preventDefault();
    const form = event.target;
    const button = form.querySelector("button");
    button.disabled = true;
    try {
      await fill(await fetch(form.action, { method: "POST", body: new URLSearchParams(new FormData(form)) }));
    } catch {
      button.disabled = false;
      say("no connection to pgxlock serve", false);
    }
  });
  dialog.addEventListener("close", () => document.getElementById(opener)?.focus());

  connect();
})();

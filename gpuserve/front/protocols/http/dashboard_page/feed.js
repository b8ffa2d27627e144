// The connection to the server: samples and events as they come, and everything else that is asked for, all
// with the token of the page. The stream is read with fetch, as an EventSource cannot carry a token.

const base = new URL("./", location.href);
const PAUSES_MS = [1000, 2000, 4000, 8000];
const HIDDEN_MS = 60000;

export function token() {
  return document.getElementById("token").value;
}

function headers(more = {}) {
  return token() ? { authorization: `Bearer ${token()}`, ...more } : more;
}

export async function ask(where, options = {}) {
  return fetch(new URL(where, base), { ...options, headers: headers(options.headers), cache: "no-store" });
}

export async function json(where) {
  const answer = await ask(where);
  if (!answer.ok) throw new Error(await reason(answer));
  return answer.json();
}

export async function reason(answer) {
  try {
    return (await answer.json()).error;
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}

export class Feed {
  // Calls `on.sample` and `on.events` with what comes, `on.lost` with the reason when it breaks off, and
  // `on.open` when it is there again. A page that nobody looks at lets the server be.
  constructor(on) {
    this.on = on;
    this.tries = 0;
    this.abort = null;
    this.timer = 0;
    document.addEventListener("visibilitychange", () => this.seen());
    // A page that was left may be kept by the browser, with its connection: six of them, and no more are made.
    addEventListener("pagehide", () => this.close());
    addEventListener("pageshow", (event) => event.persisted && this.open());
  }

  async open() {
    clearTimeout(this.timer);
    this.abort?.abort();
    const mine = (this.abort = new AbortController());
    let why = "The connection ended";
    try {
      const answer = await ask("dashboard/live", { signal: mine.signal });
      if (!answer.ok) throw new Error(await reason(answer));
      this.on.open();
      await this.read(answer.body);
    } catch (error) {
      why = error.message;
    }
    if (mine !== this.abort || mine.signal.aborted) return;
    this.on.lost(why);
    this.timer = setTimeout(() => this.open(), PAUSES_MS[Math.min(this.tries++, PAUSES_MS.length - 1)]);
  }

  close() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
  }

  async read(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let parts = [];
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      parts.push(part.value);
      if (!part.value.includes("\n\n") && !part.value.startsWith("\n")) continue;
      const events = parts.join("").split("\n\n");
      parts = [events.pop()];
      events.forEach((event) => this.take(event));
    }
  }

  take(event) {
    const [kind, data] = event.split("\n").map((line) => line.slice(line.indexOf(": ") + 2));
    this.tries = 0;
    this.on[kind]?.(JSON.parse(data));
  }

  seen() {
    clearTimeout(this.hiding);
    if (document.hidden) {
      this.hiding = setTimeout(() => this.close(), HIDDEN_MS);
    } else if (this.abort === null) {
      this.open();
    }
  }
}

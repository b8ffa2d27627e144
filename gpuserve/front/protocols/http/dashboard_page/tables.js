// Tables whose rows stay while their values change. A column says how it is told, and how it is sorted.

import { element, tell } from "./dom.js";

export class Table {
  // `columns`: {title, of: row => value to sort by, tell: (cell, row) => void, kind: classes of its cells}.
  constructor(node, columns, { key, sorted = null, onSort = () => {} }) {
    this.node = node;
    this.columns = columns;
    this.key = key;
    this.rows = new Map();
    this.sorted = sorted;
    this.onSort = onSort;
    this.heads = columns.map((column, place) => this.head(column, place));
    this.body = element("tbody");
    node.replaceChildren(element("thead", {}, element("tr", {}, ...this.heads)), this.body);
  }

  head(column, place) {
    const head = element("th", { scope: "col", className: column.kind || "" });
    if (this.sorted === null) {
      head.textContent = column.title;
      return head;
    }
    const button = element("button", { type: "button" }, column.title);
    button.addEventListener("click", () => {
      const again = this.sorted.place === place;
      this.sorted = { place, down: again ? !this.sorted.down : Boolean(column.down) };
      this.onSort();
    });
    head.append(button);
    return head;
  }

  show(rows) {
    const ordered = this.ordered(rows);
    const kept = new Set(ordered.map(this.key));
    for (const [key, { line }] of this.rows) {
      if (kept.has(key)) continue;
      line.remove();
      this.rows.delete(key);
    }
    ordered.forEach((row, at) => {
      const { line, cells } = this.line(this.key(row));
      this.columns.forEach((column, place) => column.tell(cells[place], row));
      if (this.body.children[at] !== line) this.body.insertBefore(line, this.body.children[at] || null);
    });
  }

  line(key) {
    if (!this.rows.has(key)) {
      const cells = this.columns.map((column, place) => place === 0
        ? element("th", { scope: "row", className: column.kind || "" })
        : element("td", { className: column.kind || "" }));
      this.rows.set(key, { line: element("tr", {}, ...cells), cells });
    }
    return this.rows.get(key);
  }

  ordered(rows) {
    if (this.sorted === null) return rows;
    const { place, down } = this.sorted;
    this.heads.forEach((head, at) => {
      if (at === place) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    const of = this.columns[place].of;
    const valued = rows.map((row) => [of(row), row]);
    valued.sort(([one, first], [other, second]) => (down ? -1 : 1) * compared(one, other) || compared(this.key(first), this.key(second)));
    return valued.map(([, row]) => row);
  }
}

function compared(one, other) {
  if (typeof one === "string" || typeof other === "string") {
    return String(one ?? "").localeCompare(String(other ?? ""), undefined, { numeric: true });
  }
  return (one ?? -1) - (other ?? -1);
}

export function text(of, show = String) {
  return (cell, row) => tell(cell, show(of(row)));
}

export function flagged(of, show) {
  // What is not nothing is bad.
  return (cell, row) => {
    tell(cell, show(of(row)));
    cell.classList.toggle("bad", Boolean(of(row)));
  };
}

/** Lines over positions, from zero upwards. */

const POINTS = 400;

/** Values over positions, thinned out as they grow. */
export class Series {
  points: [number, number][] = [];
  #every = 4; // steps that a point stands for, by their median
  #waiting: [number, number][] = [];

  add(position: number, value: number): void {
    this.#waiting.push([position, value]);
    if (this.#waiting.length < this.#every) return;
    this.#waiting.sort(([, a], [, b]) => a - b);
    this.points.push([position, this.#waiting[this.#waiting.length >> 1]![1]]);
    this.#waiting = [];
    if (this.points.length > POINTS) {
      this.points = this.points.filter((_, at) => at % 2 === 1);
      this.#every *= 2;
    }
  }

  copy(): Series {
    const twin = new Series();
    [twin.points, twin.#every] = [[...this.points], this.#every];
    return twin;
  }
}

/** Draws a series into a canvas, and again when the canvas changes its size. */
export class Plot {
  series = new Series();

  constructor(readonly canvas: HTMLCanvasElement, readonly unit: string) {
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  draw(): void {
    const { canvas } = this;
    const scale = devicePixelRatio;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    [canvas.width, canvas.height] = [width * scale, height * scale];
    const pen = canvas.getContext("2d")!;
    const style = getComputedStyle(document.documentElement);
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";
    const [left, bottom, right, top] = [40, height - 20, width - 8, 8];
    const { points } = this.series;
    const values = points.map(([, value]) => value);
    const last = points.at(-1)?.[0] ?? 0;
    const first = points[0]?.[0] ?? 0;
    const highest = nice(1.4 * quantile(values, 0.98));
    const x = (position: number): number => left + ((right - left) * (position - first)) / Math.max(1, last - first);
    const y = (value: number): number => bottom - ((bottom - top) * Math.min(value, highest)) / highest;
    pen.strokeStyle = style.getPropertyValue("--line");
    pen.fillStyle = style.getPropertyValue("--soft");
    for (const value of [0, highest / 2, highest]) {
      pen.beginPath();
      pen.moveTo(left, y(value));
      pen.lineTo(right, y(value));
      pen.stroke();
      pen.textAlign = "right";
      pen.fillText(String(Number(value.toPrecision(3))), left - 6, y(value) + 4);
    }
    pen.textAlign = "left";
    pen.fillText(first.toLocaleString("en"), left, height - 4);
    pen.textAlign = "right";
    pen.fillText(last.toLocaleString("en"), right, height - 4);
    pen.strokeStyle = style.getPropertyValue("--accent");
    pen.lineWidth = 2;
    pen.beginPath();
    for (const [position, value] of points) pen.lineTo(x(position), y(value));
    pen.stroke();
    if (values.length > 0) {
      const shown = Number(quantile(values, 0.5).toPrecision(3));
      canvas.setAttribute("aria-label", `${this.unit}: about ${shown} from position ${first} to ${last}`);
    }
  }
}

function quantile(values: number[], share: number): number {
  const sorted = values.toSorted((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? 1;
}

/** The next of 1, 2 or 5 times a power of ten. */
function nice(value: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value)!;
}

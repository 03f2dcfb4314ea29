// Numbers that the page holds, unpacked, and canvases with axes to draw them on.
// --- numbers ------------------------------------------------------------------------------------

async function unpack({ shape, type, data }) {
  const packed = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = await new Response(stream).arrayBuffer();
  const values = type === "u1" ? addFrames(new Uint8Array(bytes), shape) : new Float32Array(bytes);
  const strides = shape.map((_, i) => shape.slice(i + 1).reduce((a, b) => a * b, 1));
  // part(i, j): the values that have these first indices
  const part = (...index) => {
    const start = index.reduce((sum, value, i) => sum + value * strides[i], 0);
    return values.subarray(
      start,
      start + (index.length ? strides[index.length - 1] : values.length),
    );
  };
  return { shape, values, part };
}

// Frames come as differences to the frame before, modulo 256; the last axes are time, rows, columns.
function addFrames(values, shape) {
  const [frames, rows, columns] = shape.slice(-3),
    size = rows * columns;
  for (let i = size; i < values.length; i++)
    if (i % (frames * size) >= size) values[i] += values[i - size];
  return values;
}

function range(values) {
  let low = Infinity,
    high = -Infinity;
  for (const value of values)
    if (Number.isFinite(value)) {
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  return low <= high ? [low, high] : [0, 1];
}

// A number at an axis: as few digits as it has.
function short(value) {
  return written(value, (near) => String(+near.toPrecision(3)));
}

// A number in a sentence: three digits, so that readings beside each other have as many.
function reading(value) {
  return written(value, (near) => (near === 0 ? "0" : near.toPrecision(3)));
}

function written(value, plain) {
  if (!Number.isFinite(value)) return "not finite";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return power(value);
  return size >= 999.5 ? (+value.toPrecision(3)).toLocaleString("en-GB") : plain(value);
}

// 8.9·10⁻¹⁴, which no line break can cut; 10⁻¹⁴ where the factor is 1.
function power(value) {
  const [factor, exponent] = value.toExponential(1).split("e");
  const raised = [...exponent.replace("+", "")].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]));
  return (factor === "1.0" ? "" : factor.replace("-", "−") + "·") + "10" + raised.join("");
}

// --- drawing ------------------------------------------------------------------------------------

function theme() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  const names = ["paper", "ink", "muted", "pale", "class0", "class1"];
  return Object.fromEntries(names.map((name) => [name, read("--" + name)]));
}

function rgb(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function luminance(colour) {
  const [r, g, b] = colour.map((c) =>
    c / 255 <= 0.04045 ? c / 3294.6 : ((c / 255 + 0.055) / 1.055) ** 2.4,
  );
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// The colour, or where it cannot be told from the paper the nearest towards the ink that can.
function readable(hex, { paper, ink }, contrast = 3.5) {
  const back = luminance(rgb(paper)),
    target = rgb(ink);
  for (let share = 0; share < 1; share += 0.1) {
    const mixed = rgb(hex).map((c, i) => Math.round(c + share * (target[i] - c)));
    const [dark, light] = [back, luminance(mixed)].sort((a, b) => a - b);
    if ((light + 0.05) / (dark + 0.05) >= contrast) return `rgb(${mixed.join(",")})`;
  }
  return ink;
}

// A canvas with axes: x and y map numbers to pixels, and everything is drawn within its frame.
function axes(canvas, { across, up, ratio, log = false, xticks, yticks = 4 }, colours) {
  const width = canvas.clientWidth,
    height = Math.round((width - 48) * ratio) + 28;
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.font = "11px system-ui, sans-serif";
  const vertical = log ? decades(up) : ticks(up, yticks);
  const widest = Math.max(...vertical.map((at) => pen.measureText(short(at)).width));
  const left = Math.max(42, Math.ceil(widest) + 8); // as wide as the labels, 5 of it a gap
  const frame = { left, right: width - 6, top: 6, bottom: height - 22 };
  const place = log ? Math.log10 : (value) => value;
  const [low, high] = up.map(place);
  const x = (value) =>
    frame.left + ((value - across[0]) / (across[1] - across[0])) * (frame.right - frame.left);
  const y = (value) =>
    frame.bottom - ((place(value) - low) / (high - low)) * (frame.bottom - frame.top);
  pen.lineWidth = 1;
  label(
    pen,
    frame,
    xticks ?? ticks(across, 5).map((at) => [at, short(at)]),
    vertical,
    { x, y },
    colours,
  );
  return { pen, frame, x, y, width, height };
}

function label(pen, frame, xticks, yticks, { x, y }, colours) {
  pen.strokeStyle = colours.pale;
  pen.fillStyle = colours.muted;
  pen.beginPath();
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const at of yticks) {
    pen.moveTo(frame.left, y(at));
    pen.lineTo(frame.right, y(at));
    pen.fillText(short(at), frame.left - 5, y(at));
  }
  pen.textBaseline = "top";
  for (const [at, text] of xticks) {
    pen.moveTo(x(at), frame.top);
    pen.lineTo(x(at), frame.bottom);
    const half = pen.measureText(text).width / 2;
    pen.textAlign = x(at) + half > frame.right ? "right" : "center";
    pen.fillText(text, Math.min(x(at), frame.right), frame.bottom + 6);
  }
  pen.stroke();
}

function ticks([low, high], count) {
  const raw = (high - low) / count,
    power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++)
    found.push(i * step);
  return found;
}

// Powers of ten, or where these are few their double and half as well.
function decades([low, high]) {
  const inside = (factors) => {
    const found = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++)
      for (const f of factors)
        if (f * 10 ** p >= low && f * 10 ** p <= high) found.push(f * 10 ** p);
    return found;
  };
  const powers = inside([1]),
    every = Math.ceil(powers.length / 6);
  return powers.length < 3 ? inside([1, 2, 5]) : powers.filter((_, i) => i % every === 0);
}

function clipped(pen, frame, draw) {
  pen.save();
  pen.beginPath();
  pen.rect(frame.left, frame.top, frame.right - frame.left, frame.bottom - frame.top);
  pen.clip();
  draw();
  pen.restore();
}

// A line through points, broken where one is not finite; far values stay where a canvas can draw.
function curve({ pen, x, y }, xs, ys, colour, width, dash = []) {
  pen.strokeStyle = colour;
  pen.lineWidth = width;
  pen.setLineDash(dash);
  pen.lineJoin = "round";
  pen.beginPath();
  let on = false;
  for (let i = 0; i < ys.length; i++) {
    const at = y(ys[i]);
    if (!Number.isFinite(at)) {
      on = false;
      continue;
    }
    pen[on ? "lineTo" : "moveTo"](x(xs[i]), Math.max(-1e4, Math.min(1e4, at)));
    on = true;
  }
  pen.stroke();
  pen.setLineDash([]);
}

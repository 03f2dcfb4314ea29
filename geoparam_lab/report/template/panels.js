// What a slider shows at one of its frames: the panels of a method, and curves over all frames.
//
// Each function draws on a canvas and returns what the drawing says, in words.
// --- Levy ---------------------------------------------------------------------------------------

function levy({ arrays, colours, seed }, canvas, m, t, look) {
  const at = [seed, m, t],
    { grid, truth, x, y, prediction, locations, loss, moves } = arrays;
  const across = range(grid.values),
    [low, high] = range([...truth.values, ...y.values]);
  const room = high - low,
    up = [low - 0.16 * room, high + 0.08 * room];
  const plot = axes(canvas, { across, up, ratio: 0.56 }, look);
  const { pen, frame } = plot,
    colour = readable(colours[m], look),
    units = locations.part(...at);
  const inside = units.filter((place) => place >= across[0] && place <= across[1]);
  clipped(pen, frame, () => {
    curve(plot, grid.values, truth.values, look.muted, 1.3, [5, 3]);
    pen.fillStyle = look.ink;
    for (let i = 0; i < x.values.length; i++)
      dot(pen, plot.x(x.values[i]), plot.y(y.values[i]), 2);
    curve(plot, grid.values, prediction.part(...at), colour, 2.2);
    pen.lineWidth = 1;
    pen.globalAlpha = 0.8;
    pen.beginPath();
    for (const place of inside) {
      pen.moveTo(plot.x(place), frame.bottom);
      pen.lineTo(plot.x(place), frame.bottom - 12);
    }
    pen.stroke();
  });
  const inView = `${inside.length} of ${units.length} units in view`;
  return `loss ${reading(loss.part(...at)[0])}, ${inView}, ${most("moved", moves.part(...at)[0])}`;
}

function most(happened, value, sign = "") {
  const amount = Number.isFinite(value) ? `at most ${reading(value)}${sign}` : "not finite";
  return `${happened} since the frame before: ${amount}`;
}

function dot(pen, x, y, radius) {
  pen.beginPath();
  pen.arc(x, y, radius, 0, 7);
  pen.fill();
}

// --- Banana -------------------------------------------------------------------------------------

const CLASSES = ["#0072b2", "#e69f00"];

function banana({ arrays, units, seed }, canvas, m, t, look) {
  const at = [seed, m, t],
    { x, y, limits, score, direction, distance, accuracy, rotation } = arrays;
  const [left, right, low, high] = limits.values;
  const ratio = Math.min(1.6, Math.max(0.6, (high - low) / (right - left)));
  const plot = axes(canvas, { across: [left, right], up: [low, high], ratio, yticks: 5 }, look);
  const { pen, frame } = plot,
    [rows, columns] = score.shape.slice(-2),
    p = score.part(...at);
  const normals = direction.part(...at),
    offsets = distance.part(...at);
  let inView = 0;
  clipped(pen, frame, () => {
    shade(plot, p, rows, columns, look);
    points(plot, x.values, y.values, look);
    contour(plot, p, rows, columns, look.ink);
    for (let u = 0; u < offsets.length; u++) {
      const normal = [normals[2 * u], normals[2 * u + 1]];
      inView += unit(plot, normal, offsets[u], readable(units[u % units.length], look), look);
    }
    origin(plot, look.ink);
  });
  const rate = `accuracy ${reading(accuracy.part(...at)[0])}`;
  const turned = most("turned", rotation.part(...at)[0], "°");
  return `${rate}, ${inView} of ${offsets.length} locations in view, ${turned}`;
}

function shade({ pen, frame }, p, rows, columns, look) {
  const image = new ImageData(columns, rows),
    paper = rgb(look.paper);
  const fills = [rgb(look.class0), rgb(look.class1)];
  for (let i = 0; i < p.length; i++) {
    const row = rows - 1 - Math.floor(i / columns),
      target = 4 * (row * columns + (i % columns));
    const fill = fills[p[i] > 127 ? 1 : 0],
      share = Math.min(1, 0.35 + Math.abs(p[i] - 127.5) / 90);
    for (let c = 0; c < 3; c++) image.data[target + c] = paper[c] + share * (fill[c] - paper[c]);
    image.data[target + 3] = 255;
  }
  const small = document.createElement("canvas");
  small.width = columns;
  small.height = rows;
  small.getContext("2d").putImageData(image, 0, 0);
  // Values are at the corners of the frame, pixels have a width: half of one lies outside.
  const wide = (frame.right - frame.left) / (columns - 1),
    tall = (frame.bottom - frame.top) / (rows - 1);
  pen.drawImage(small, frame.left - wide / 2, frame.top - tall / 2, wide * columns, tall * rows);
}

function points({ pen, x, y }, xs, labels, look) {
  const colours = CLASSES.map((c, k) =>
    readable(c, { paper: look["class" + k], ink: look.ink }, 2.5),
  );
  pen.globalAlpha = 0.5;
  for (let i = 0; i < labels.length; i++) {
    const at = [x(xs[2 * i]), y(xs[2 * i + 1])],
      kind = labels[i] > 0.5 ? 1 : 0;
    pen.fillStyle = colours[kind];
    if (kind === 0) dot(pen, ...at, 1.8);
    else triangle(pen, ...at, 2.4);
  }
  pen.globalAlpha = 1;
}

function triangle(pen, x, y, size) {
  pen.beginPath();
  pen.moveTo(x, y - size);
  pen.lineTo(x + size, y + size);
  pen.lineTo(x - size, y + size);
  pen.fill();
}

// Marching squares without their table: on each cell's sides, the points where p crosses the middle.
function contour({ pen, frame }, p, rows, columns, colour) {
  const level = 127.5,
    wide = (frame.right - frame.left) / (columns - 1),
    tall = (frame.bottom - frame.top) / (rows - 1);
  const corners = [
    [0, 0],
    [0, 1],
    [1, 1],
    [1, 0],
  ];
  pen.strokeStyle = colour;
  pen.lineWidth = 2.4;
  pen.lineCap = "round";
  pen.beginPath();
  for (let r = 0; r + 1 < rows; r++)
    for (let c = 0; c + 1 < columns; c++) {
      const crossed = [];
      for (let k = 0; k < 4; k++) {
        const [[r0, c0], [r1, c1]] = [corners[k], corners[(k + 1) % 4]];
        const a = p[(r + r0) * columns + c + c0] - level,
          b = p[(r + r1) * columns + c + c1] - level;
        if (a > 0 === b > 0) continue;
        const share = a / (a - b);
        crossed.push([
          frame.left + (c + c0 + share * (c1 - c0)) * wide,
          frame.bottom - (r + r0 + share * (r1 - r0)) * tall,
        ]);
      }
      for (let k = 0; k + 1 < crossed.length; k += 2) {
        pen.moveTo(...crossed[k]);
        pen.lineTo(...crossed[k + 1]);
      }
    }
  pen.stroke();
}

// A unit's line with teeth on its active side, and its location; returns whether that is in view.
function unit({ pen, frame, x, y }, [a, b], lam, colour, look) {
  const at = [x(-lam * a), y(-lam * b)],
    across = x(1) - x(0),
    up = y(0) - y(1);
  if (!at.every(Number.isFinite)) return 0;
  const size = Math.hypot(a * up, b * across),
    normal = [(a * up) / size, (-b * across) / size];
  const along = [-normal[1], normal[0]],
    reach = frame.right - frame.left + frame.bottom - frame.top;
  const middle = [(frame.left + frame.right) / 2, (frame.top + frame.bottom) / 2];
  const shift = (middle[0] - at[0]) * along[0] + (middle[1] - at[1]) * along[1];
  const start = [at[0] + shift * along[0], at[1] + shift * along[1]]; // the line's nearest point to the middle
  pen.strokeStyle = colour;
  pen.lineWidth = 1.3;
  pen.beginPath();
  pen.moveTo(start[0] - reach * along[0], start[1] - reach * along[1]);
  pen.lineTo(start[0] + reach * along[0], start[1] + reach * along[1]);
  const first = -shift - Math.floor((reach - shift) / 14) * 14; // teeth stand still on their line
  for (let s = first; s < reach; s += 14) {
    const foot = [start[0] + s * along[0], start[1] + s * along[1]];
    pen.moveTo(...foot);
    pen.lineTo(foot[0] + 5 * normal[0], foot[1] + 5 * normal[1]);
  }
  pen.stroke();
  star(pen, at, colour, look.paper);
  return at[0] >= frame.left && at[0] <= frame.right && at[1] >= frame.top && at[1] <= frame.bottom
    ? 1
    : 0;
}

function star(pen, [x, y], fill, edge) {
  pen.beginPath();
  for (let k = 0; k < 10; k++) {
    const radius = k % 2 ? 3.4 : 8,
      angle = (Math.PI * k) / 5;
    pen.lineTo(x + radius * Math.sin(angle), y - radius * Math.cos(angle));
  }
  pen.closePath();
  pen.fillStyle = fill;
  pen.fill();
  pen.strokeStyle = edge;
  pen.lineWidth = 1;
  pen.stroke();
}

function origin({ pen, x, y }, colour) {
  pen.strokeStyle = colour;
  pen.lineWidth = 1.5;
  pen.beginPath();
  pen.moveTo(x(0) - 5, y(0));
  pen.lineTo(x(0) + 5, y(0));
  pen.moveTo(x(0), y(0) - 5);
  pen.lineTo(x(0), y(0) + 5);
  pen.stroke();
}

// --- curves over the frames ---------------------------------------------------------------------

function strip({ arrays, colours, dashes, methods, steps, seed }, canvas, name, t, look) {
  const { values, part } = arrays[name],
    positive = values.filter((v) => v > 0 && v < Infinity);
  const [low, high] = range(positive),
    log = high > 30 * low;
  const all = log ? [low, high] : range(values),
    room = (all[1] - all[0] || 1) * 0.06;
  const up = log ? [all[0] / 1.3, all[1] * 1.3] : [all[0] - room, all[1] + room];
  const last = steps.length - 1,
    marks = [0, 0.25, 0.5, 0.75, 1].map((share) => Math.round(share * last));
  const xticks = [...new Set(marks)].map((i) => [i, short(steps[i])]);
  const plot = axes(
    canvas,
    { across: [0, Math.max(last, 1)], up, ratio: 0.42, log, xticks },
    look,
  );
  const frames = steps.map((_, i) => i);
  clipped(plot.pen, plot.frame, () => {
    methods.forEach((_, m) =>
      curve(plot, frames, part(seed, m), readable(colours[m], look), 1.8, dashes[m]),
    );
    curve(plot, [t, t], up, look.ink, 1);
  });
  return methods.map((title, m) => `${title} ${reading(part(seed, m)[t])}`);
}

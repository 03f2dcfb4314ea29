// The sliders of a report, figures at full size, and the buttons that copy a command.
//
// A slider's numbers are in a JSON element inside it (report/page.py packs them). Each canvas says
// in data-what what it shows: "method" is the panel of a method, all others are curves over the
// frames, one for each method. Frames are evenly spaced, epochs need not be. film.seed is the place
// of the chosen seed among the seeds.
// --- a slider -----------------------------------------------------------------------------------

const KINDS = { levy, banana };

async function start(root) {
  const film = JSON.parse(root.querySelector("script").textContent);
  for (const name of Object.keys(film.arrays)) film.arrays[name] = await unpack(film.arrays[name]);
  const input = root.querySelector("input"),
    output = root.querySelector("output"),
    select = root.querySelector("select");
  const canvases = [...root.querySelectorAll("canvas")];
  const panels = canvases.filter((canvas) => canvas.dataset.what === "method");

  function draw() {
    const t = Number(input.value),
      look = theme(),
      colours = film.colours.map((c) => readable(c, look));
    film.seed = Number(select.value);
    output.textContent = film.steps[t].toLocaleString("en-GB");
    input.setAttribute("aria-valuetext", "epoch " + output.textContent);
    for (const canvas of canvases) {
      const [title, reading] = canvas.parentElement.querySelector("figcaption").children;
      const m = panels.indexOf(canvas);
      const texts =
        m >= 0
          ? [KINDS[film.kind](film, canvas, m, t, look)]
          : strip(film, canvas, canvas.dataset.what, t, look);
      if (m >= 0) title.style.color = colours[m];
      reading.replaceChildren(...texts.map((text, i) => coloured(text, m >= 0 ? "" : colours[i])));
      canvas.setAttribute(
        "aria-label",
        `${title.textContent}, epoch ${output.textContent}: ${texts.join(", ")}`,
      );
    }
  }

  let waiting = false;
  function soon() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  }
  input.addEventListener("input", soon);
  select.addEventListener("input", soon);
  new ResizeObserver(soon).observe(root);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", soon);
  player(root.querySelector("[data-play]"), input);
  draw();
  root.dataset.ready = "";
}

function coloured(text, colour) {
  const part = document.createElement("span");
  part.textContent = text + " ";
  part.style.color = colour;
  return part;
}

function player(button, input) {
  let timer = null;
  function stop() {
    clearInterval(timer);
    timer = null;
    button.textContent = "Play";
  }
  function next() {
    if (input.value === input.max) return stop();
    input.value = Number(input.value) + 1;
    input.dispatchEvent(new Event("input"));
  }
  button.addEventListener("click", () => {
    if (timer !== null) return stop();
    if (input.value === input.max) {
      input.value = 0;
      input.dispatchEvent(new Event("input"));
    }
    timer = setInterval(next, 120);
    button.textContent = "Pause";
  });
}

function copying(button) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    getSelection().selectAllChildren(code);
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      document.execCommand("copy");
    }
    button.textContent = "Copied";
  });
}

// A figure over the whole window; Escape and "Close" go back to the page.
function enlarging(figure) {
  const image = figure.querySelector("img");
  function open() {
    const dialog = document.createElement("dialog"),
      close = document.createElement("button");
    dialog.className = "full";
    dialog.setAttribute("aria-label", image.alt);
    close.textContent = "Close";
    close.addEventListener("click", () => dialog.close());
    dialog.addEventListener("close", () => dialog.remove());
    dialog.append(close, image.cloneNode());
    document.body.append(dialog);
    dialog.showModal();
  }
  image.addEventListener("click", open);
  figure.querySelector("button").addEventListener("click", open);
}

document.querySelectorAll("[data-full]").forEach(enlarging);
document.querySelectorAll("[data-copy]").forEach(copying);
document.querySelectorAll("[data-slider]").forEach(start);

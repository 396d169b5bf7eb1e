/**
 * Images that go with the next message: picked, pasted or dropped, made small enough to be sent and
 * kept, and shown until then. It knows the composer's elements and nothing of the conversation.
 */

import { make } from "./elements.js";
import { cross } from "./panels.js";

const at = (id) => document.getElementById(id);
const tray = at("images");
const LONGEST = 1024; // pixels of a side: encoders of models that see take fewer
const MOST = 8; // with one message
const KIND = "image/jpeg";
const QUALITY = 0.85;

let waiting = []; // data URIs
let allowed = false;
let tell = () => {};

/** Show the images of a message, which are data URIs; `lost` of them are not kept any more. */
export function shown(uris, lost = 0) {
  const found = uris.map((uri, index) =>
    make("img", { src: uri, alt: `Image ${index + 1} of the message` }),
  );
  if (lost) {
    const words = lost === 1 ? "An image was not kept." : `${lost} images were not kept.`;
    found.push(make("span", { class: "hint" }, words));
  }
  return found.length ? [make("div", { class: "shown" }, ...found)] : [];
}

/** Take what waits, for the message that is sent now. */
export function take() {
  const found = waiting;
  waiting = [];
  draw();
  return found;
}

/** Put images back that were taken. */
export function put(uris) {
  waiting = [...uris, ...waiting].slice(0, MOST);
  draw();
}

/** Only models that see are shown images; what waits is kept for one. */
export function allow(sees) {
  allowed = sees;
  at("attach").hidden = !sees;
  draw();
}

/** Listen to the button, to what is pasted, and to what is dropped; `say` tells what happened. */
export function wire(say) {
  tell = say;
  const picker = at("file");
  at("attach").addEventListener("click", () => picker.click());
  picker.addEventListener("change", () => {
    void add(picker.files);
    picker.value = "";
  });
  at("input").addEventListener("paste", (event) => {
    if (!allowed || !event.clipboardData.files.length) return;
    event.preventDefault();
    void add(event.clipboardData.files);
  });
  const room = at("composer");
  room.addEventListener("dragover", (event) => {
    if (allowed && event.dataTransfer.types.includes("Files")) event.preventDefault();
  });
  room.addEventListener("drop", (event) => {
    if (!allowed || !event.dataTransfer.files.length) return;
    event.preventDefault();
    void add(event.dataTransfer.files);
  });
}

async function add(files) {
  for (const file of Array.from(files)) {
    if (waiting.length >= MOST) {
      tell(`A message takes ${MOST} images.`);
      break;
    }
    const uri = await small(file).catch(() => null);
    if (uri) waiting.push(uri);
    tell(uri ? `${file.name} is attached.` : `${file.name} is no image that this browser can read.`);
    draw(uri ? "" : `${file.name} is no image that this browser can read.`);
  }
  at("input").focus();
}

/** Return an image as a data URI, no longer than models look at. */
async function small(file) {
  const image = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST / Math.max(image.width, image.height));
  const canvas = make("canvas");
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#fff"; // behind what is transparent
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.drawImage(image, 0, 0, canvas.width, canvas.height);
  image.close();
  return canvas.toDataURL(KIND, QUALITY);
}

function draw(trouble = "") {
  const items = waiting.map((uri, index) => {
    const label = `Remove image ${index + 1}`;
    const remove = make("button", { type: "button", class: "quiet", "aria-label": label }, cross());
    remove.addEventListener("click", () => {
      waiting.splice(index, 1);
      draw();
      at("input").focus();
    });
    return make("li", {}, make("img", { src: uri, alt: `Attached image ${index + 1}` }), remove);
  });
  tray.replaceChildren(...items);
  tray.hidden = !items.length;
  const blind = items.length && !allowed ? "The chosen model takes no images." : "";
  at("image-trouble").textContent = trouble || blind;
  at("image-trouble").hidden = !(trouble || blind);
}

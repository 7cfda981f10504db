// The server's API: one request, its events, its faults. Addresses are relative, so a proxy may add a path.

const KEY = "ddtree.key";
const BROKEN = "the stream broke off before its end: is the server still there?";

/** A fault that the server named, or the lack of a server. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

let held = null; // where the browser forbids storage

/** The key stays in this tab alone. */
export const key = {
  get() {
    try {
      return held ?? sessionStorage.getItem(KEY) ?? "";
    } catch {
      return "";
    }
  },
  set(value) {
    held = value;
    try {
      sessionStorage.setItem(KEY, value);
    } catch {
      // It holds until the page is left.
    }
  },
};

/** GET as JSON. */
export async function get(path) {
  return (await answered(path, { headers: headers() })).json();
}

/** The chunks of a streamed chat, until its end. Throws ApiError; ends with an AbortError when `signal` does. */
export async function* chat(body, signal) {
  const response = await answered("v1/chat/completions", {
    method: "POST",
    headers: { ...headers(), "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  let done = false;
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      done = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, chunk.error.code ?? 500);
    yield chunk;
  }
  if (!done) throw new ApiError(BROKEN, 0);
}

function headers() {
  return key.get() ? { authorization: `Bearer ${key.get()}` } : {};
}

async function answered(path, options) {
  if (/[^\x00-\xff]/.test(key.get())) {
    key.set(""); // or every request from now on would fail like this one
    throw new ApiError("the key holds a character that no header can carry; type it again", 401);
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server does not answer: is it still running?", 0);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ApiError(body?.error?.message ?? `the server answered ${response.status}`, response.status);
}

/** The data of server-sent events; comments carry none. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new ApiError(BROKEN, 0);
    });
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}

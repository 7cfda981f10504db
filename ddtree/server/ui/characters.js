// Characters that lie in several tokens. The server shows such a piece as `bytes:\xf0\x9f`; read along a path, the token that ends
// the character shows it, and those before it their bytes, as in ‹f09f›.

const PIECE = /^bytes:((?:\\x[0-9a-f]{2})+)$/;
const NONE = [];
const encoder = new TextEncoder();
const decoder = new TextDecoder("utf-8", { ignoreBOM: true });

/** Tokens, one after the other, to text: `take` returns what has become certain with each, `end` the rest. */
export class Reader {
  left = NONE;

  take(token) {
    const { text, left } = read(token, this.left);
    this.left = left;
    return text;
  }

  end() {
    return decoder.decode(Uint8Array.from(this.left));
  }
}

/** Makes the tokens of one round after the other legible. */
export class RoundReader {
  before = NONE; // the bytes that were left before the next root

  /** The round with legible tokens, and `pieces`: which nodes, and whether the bonus token (-1), do not end their character. */
  legible(trace) {
    const { tokens, parents, path, bonus_token, emitted } = trace;
    if (!this.before.length && ![...tokens, bonus_token.token].some((token) => PIECE.test(token))) return { ...trace, pieces: new Set() };
    const found = [];
    tokens.forEach((token, i) => found.push(read(token, i ? found[parents[i]].left : this.before)));
    const bonus = read(bonus_token.token, found[path.at(-1)].left);
    // The next root is the last token emitted.
    this.before = found[path[emitted.length - 1]].left;
    const pieces = new Set(parents.map((_, i) => i).filter((i) => found[i].piece));
    if (bonus.piece) pieces.add(-1);
    return { ...trace, tokens: found.map(shown), bonus_token: { ...bonus_token, token: shown(bonus) }, pieces };
  }
}

/** What the accepted path makes of a piece: the text that ends its character, or "" where none does. */
export function whole({ tokens, path, bonus_token, pieces }, node) {
  const at = path.indexOf(node);
  if (at < 0) return "";
  const next = [...path.slice(at + 1), -1].find((each) => !pieces.has(each));
  return next === undefined ? "" : next < 0 ? bonus_token.token : tokens[next];
}

function read(token, before) {
  const bytes = bytesOf(token);
  if (!bytes && !before.length) return { text: token, left: NONE };
  const all = [...before, ...(bytes ?? encoder.encode(token))];
  const end = all.length - unfinished(all);
  const left = all.slice(end);
  return { text: decoder.decode(Uint8Array.from(all.slice(0, end))), left, piece: end === 0 && left.length > 0 && bytes };
}

function shown({ text, piece }) {
  return piece ? `‹${piece.map((byte) => byte.toString(16).padStart(2, "0")).join("")}›` : text;
}

function bytesOf(token) {
  const found = PIECE.exec(token);
  return found && found[1].slice(2).split("\\x").map((hex) => parseInt(hex, 16));
}

/** How many bytes at the end begin a character that is not whole yet. */
function unfinished(bytes) {
  for (let n = 1; n <= Math.min(3, bytes.length); n++) {
    const byte = bytes.at(-n);
    if (byte >= 0xf5) return 0; // begins none
    if (byte >= 0xc0) return n < (byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2) ? n : 0;
    if (byte < 0x80) return 0;
  }
  return 0;
}

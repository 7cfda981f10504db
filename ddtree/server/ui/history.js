// Conversations and settings, in this browser alone.

const CHATS = "ddtree.chats";
const SETTINGS = "ddtree.settings";
const MOST = 50; // conversations; the oldest go first
const ROLES = ["user", "assistant"];

const isText = (value) => typeof value === "string";

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** All conversations, newest first: { id, title, messages }. What is none, or no message, is passed over. */
export function chats() {
  const kept = read(CHATS, []);
  return Array.isArray(kept) ? kept.map(chatOf).filter((chat) => chat !== null) : [];
}

function chatOf(kept) {
  if (!isText(kept?.id) || !Array.isArray(kept.messages)) return null;
  const messages = kept.messages.map(messageOf).filter((message) => message !== null);
  return messages.length ? { id: kept.id, title: isText(kept.title) ? kept.title : "", messages } : null;
}

function messageOf(kept) {
  if (!ROLES.includes(kept?.role) || !isText(kept.content)) return null;
  const { role, content } = kept;
  const [reasoning, foot] = [kept.reasoning, kept.foot].map((value) => (isText(value) ? value : ""));
  return { role, content, reasoning, foot, rounds: roundsOf(kept.rounds), thoughtRounds: roundsOf(kept.thoughtRounds) };
}

function roundsOf(kept) {
  const isRound = (each) => Array.isArray(each) && each.length === 3 && each.every(Number.isSafeInteger);
  return Array.isArray(kept) && kept.every(isRound) ? kept : [];
}

/** Keep a conversation; the oldest ones go where there is no room. */
export function keep(chat) {
  write([chat, ...chats().filter((each) => each.id !== chat.id)].slice(0, MOST));
}

export function forget(id) {
  write(chats().filter((each) => each.id !== id));
}

function write(all) {
  // One that has no room even alone does not cost the others theirs.
  const least = Math.min(all.length, 1);
  for (let most = all.length; most >= least; most--) {
    try {
      localStorage.setItem(CHATS, JSON.stringify(all.slice(0, most)));
      return;
    } catch {
      // Full, or forbidden.
    }
  }
}

/** By the control's id: its text, or whether it is checked, if what was stored is that. */
export function settings() {
  return Object(read(SETTINGS, {}));
}

export function keepSettings(values) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(values));
  } catch {
    // Full or forbidden: they hold for this visit.
  }
}

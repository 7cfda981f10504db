// Conversations and settings, in this browser alone.

const CHATS = "ddtree.chats";
const SETTINGS = "ddtree.settings";
const MOST = 50; // conversations; the oldest go first

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** All conversations, newest first: { id, title, messages }. */
export function chats() {
  const kept = read(CHATS, []);
  return Array.isArray(kept) ? kept : [];
}

/** Keep a conversation; the oldest ones go where there is no room. */
export function keep(chat) {
  write([chat, ...chats().filter((each) => each.id !== chat.id)].slice(0, MOST));
}

export function forget(id) {
  write(chats().filter((each) => each.id !== id));
}

function write(all) {
  for (let most = all.length; most >= 0; most--) {
    try {
      localStorage.setItem(CHATS, JSON.stringify(all.slice(0, most)));
      return;
    } catch {
      // Full, or forbidden.
    }
  }
}

export function settings() {
  return read(SETTINGS, {});
}

export function keepSettings(values) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(values));
  } catch {
    // Full or forbidden: they hold for this visit.
  }
}

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
  return read(CHATS, []);
}

/** Keep a conversation; the oldest ones go where there is no room. */
export function keep(chat) {
  const all = [chat, ...chats().filter((each) => each.id !== chat.id)].slice(0, MOST);
  while (all.length) {
    try {
      localStorage.setItem(CHATS, JSON.stringify(all));
      return;
    } catch {
      all.pop();
    }
  }
}

export function forget(id) {
  localStorage.setItem(CHATS, JSON.stringify(chats().filter((each) => each.id !== id)));
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

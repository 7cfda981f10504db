// The chat page: what the user does, what the server says, and where both are shown.

import { ApiError, chat as streamed, get, key } from "./api.js";
import { make } from "./dom.js";
import * as history from "./history.js";
import { MessageView, blank } from "./message.js";
import { Panel } from "./panel.js";
import { race } from "./race.js";

const $ = (id) => document.getElementById(id);
const KEPT_SETTINGS = ["system", "temperature", "seed", "max-tokens", "thinking", "budget", "auto", "shade"];
const SEEDS = 2 ** 31;

const panel = new Panel($("panel"));
let conversation = fresh();
let views = [];
let running = null; // the AbortController of what runs
let unfinished = () => null; // the message that is being written

function fresh() {
  return { id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, title: "", messages: [] };
}

// ---- settings ----

const value = (node) => (node.type === "checkbox" ? node.checked : node.value);

function restoreSettings() {
  const kept = history.settings();
  for (const id of KEPT_SETTINGS) {
    if (typeof kept[id] !== typeof value($(id))) continue;
    if ($(id).type === "checkbox") $(id).checked = kept[id];
    else $(id).value = kept[id];
  }
  if ($("thinking").selectedIndex < 0) $("thinking").value = "";
  showBudget();
}

function settingsChanged() {
  showBudget();
  history.keepSettings(Object.fromEntries(KEPT_SETTINGS.map((id) => [id, value($(id))])));
}

function showBudget() {
  const auto = $("auto").checked;
  $("budget").disabled = $("budget-number").disabled = auto;
  $("budget-number").value = auto ? "" : $("budget").value;
  $("budget-number").placeholder = auto ? "auto" : "";
}

/** The request for the conversation as it stands. */
function body() {
  const number = (id) => ($(id).value === "" ? null : Number($(id).value));
  const system = $("system").value.trim();
  // A question that failed or was stopped before its answer began is shown, and not asked again with the next.
  const answered = ({ role }, i, all) => role !== "user" || i === all.length - 1 || all[i + 1].role !== "user";
  const asked = conversation.messages.filter(answered).map(({ role, content }) => ({ role, content }));
  const wanted = {
    messages: system ? [{ role: "system", content: system }, ...asked] : asked,
    temperature: number("temperature"),
    seed: number("seed"),
    max_tokens: number("max-tokens"),
    tree_budget: $("auto").checked ? "auto" : Number($("budget").value),
    ddtree_trace: true,
  };
  if ($("thinking").value) wanted.enable_thinking = $("thinking").value === "true";
  return wanted;
}

// ---- asking ----

/** Stream one answer: `onPiece(delta, round, tokens)` for its text; the panel, if it is to watch, for its rounds. */
async function ask(wanted, onPiece, watched = true) {
  if (watched) panel.clear();
  let [round, tokens, report, reason] = [0, 1, null, null];
  for await (const chunk of streamed(wanted, running.signal)) {
    if (chunk.ddtree_trace) {
      if (watched) panel.add(chunk.ddtree_trace);
      [round, tokens] = [chunk.ddtree_trace.round, chunk.ddtree_trace.emitted.length];
    }
    for (const choice of chunk.choices) {
      if (choice.delta.content || choice.delta.reasoning_content) onPiece(choice.delta, round, tokens);
      reason = choice.finish_reason ?? reason;
    }
    report = chunk.ddtree ?? report;
  }
  if (watched) panel.finish(report);
  return { report, reason };
}

async function answer() {
  const view = show(blank("assistant"));
  unfinished = () => view.message;
  try {
    view.around = (draw) => {
      const follows = atBottom();
      draw();
      if (follows) scrollDown();
    };
    const { report, reason } = await ask(body(), (...piece) => view.add(...piece));
    view.message.foot = footOf(report, reason);
    say(`Answer complete. ${view.message.foot}`);
  } catch (error) {
    if (error.name === "AbortError") {
      view.message.foot = "stopped";
      say("Stopped.");
    } else {
      view.message.foot = "broken off";
      refuse(error, view);
    }
  }
  view.around(() => view.draw());
  if (hasText(view.message)) conversation.messages.push(view.message);
}

const hasText = ({ content, reasoning }) => Boolean(content || reasoning);

/** The conversation with what there is of an answer that the page may not see the end of. */
function asItStands() {
  const message = unfinished();
  if (!message || !hasText(message)) return conversation;
  return { ...conversation, messages: [...conversation.messages, { ...message, foot: "stopped" }] };
}

function keepUnfinished() {
  if (running) history.keep(asItStands());
}

/** The page goes. Browsers cut the stream first, which must not be taken for the server's end. */
function leave() {
  keepUnfinished();
  running?.abort();
}

function footOf(report, reason) {
  if (!report) return "";
  const speed = report.tokens_per_second ? `, ${report.tokens_per_second.toFixed(1)} tokens/s` : "";
  // Without what lay after a stop, which mean_acceptance_length counts.
  const { output_tokens: tokens, decode_rounds: rounds } = report;
  const length = rounds ? `, ${((tokens - 1) / rounds).toFixed(2)} a round` : "";
  const why = reason === "length" ? ", cut by the longest answer" : "";
  return `${tokens} tokens${speed}${length}${why}`;
}

async function raced() {
  // Both lanes need one seed, and luck must not tell them apart.
  const wanted = body();
  const { root, done, first } = race(ask, { ...wanted, seed: wanted.seed ?? Math.floor(Math.random() * SEEDS) }, $("shade").checked);
  unfinished = () => first().message;
  $("messages").append(root);
  toBottom();
  try {
    panel.compare(await done);
    say("Race over.");
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else refuse(error, { fail: (words) => root.append(make("p", { class: "fault", role: "alert" }, words)) });
  }
  const { message, report } = first();
  if (hasText(message)) conversation.messages.push({ ...message, foot: report ? footOf(report) : "stopped" });
}

function refuse(error, view) {
  view.fail(error.message);
  say("");
  running.refused = true;
  if (error instanceof ApiError) {
    if (error.status === 401) askForKey(error.message);
  } else console.error(error);
}

async function send(how) {
  const text = $("prompt").value.trim();
  if (!text || running) return;
  $("prompt").value = "";
  const message = blank("user", text);
  show(message);
  conversation.messages.push(message);
  conversation.title ||= text.slice(0, 60);
  running = new AbortController();
  busy(true);
  say("Answering …");
  toBottom();
  const mine = conversation;
  history.keep(mine);
  try {
    await how();
  } finally {
    // What was asked in vain can be asked again.
    if (running.refused && mine.messages.at(-1) === message) $("prompt").value ||= text;
    running = null;
    unfinished = () => null;
    busy(false);
    history.keep(mine);
  }
}

function busy(yes) {
  const focused = document.activeElement;
  $("stop").disabled = !yes;
  for (const id of ["send", "race", "new-chat", "open-chats"]) $(id).disabled = yes;
  // A button that is disabled would lose the keyboard's place.
  if (focused.disabled) $(yes ? "stop" : "prompt").focus();
  $("messages").setAttribute("aria-busy", yes);
  document.body.classList.toggle("running", yes);
}

// ---- showing ----

function show(message) {
  const view = new MessageView(message, $("shade").checked);
  views.push(view);
  $("messages").append(view.root);
  return view;
}

const say = (words) => ($("status").textContent = words);
// On a small screen the whole page scrolls.
const scroller = () => (getComputedStyle($("messages")).overflowY === "visible" ? document.scrollingElement : $("messages"));
const scrollDown = () => (scroller().scrollTop = scroller().scrollHeight);
const toBottom = () => requestAnimationFrame(scrollDown);

function atBottom() {
  const { scrollHeight, scrollTop, clientHeight } = scroller();
  return scrollHeight - scrollTop - clientHeight < 60;
}

function open(chat) {
  conversation = chat;
  views = [];
  $("messages").replaceChildren();
  chat.messages.forEach(show);
  panel.clear();
  say("");
  toBottom();
}

function listChats() {
  const items = history.chats().map((chat, i) => {
    const title = chat.title || "untitled";
    const choose = make("button", { type: "submit", class: "chat" }, title);
    choose.addEventListener("click", () => open(chat));
    const drop = make("button", { type: "button", "aria-label": `Delete ${title}` }, "Delete");
    drop.addEventListener("click", () => {
      history.forget(chat.id);
      if (chat.id === conversation.id) open(fresh());
      listChats();
      // The keyboard's place is the next one's, or the button that closes.
      const buttons = $("chats").querySelectorAll("li > [aria-label], form > button");
      buttons[Math.min(i, buttons.length - 1)].focus();
    });
    return make("li", {}, choose, drop);
  });
  $("chat-list").replaceChildren(...(items.length ? items : [make("li", {}, "None yet.")]));
}

function askForKey(words) {
  $("key-fault").textContent = key.get() ? words : "";
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

/** Learn the model's name and the largest budget; ask for a key, or wait for the model, where that is needed. */
async function meet() {
  try {
    const stats = await get("stats");
    if (stats.state !== "ready") {
      say(stats.state === "starting" ? "The model is still loading …" : `The server is ${stats.state}.`);
      if (stats.state === "starting") setTimeout(meet, 1000);
      return;
    }
    $("budget").max = $("budget-number").max = stats.tree_budget.max;
    if (!("auto" in history.settings())) {
      const { default: chosen } = stats.tree_budget;
      $("auto").checked = chosen === "auto";
      if (chosen !== "auto") $("budget").value = chosen;
    }
    showBudget();
    const { data } = await get("v1/models");
    $("model").textContent = data[0].id;
    say(stats.drafter ? "" : "No drafter is loaded: answers come one token at a time.");
  } catch (error) {
    if (error.status === 401) askForKey(error.message);
    else say(error.message);
  }
}

// ---- wiring ----

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send(answer);
});
$("race").addEventListener("click", () => send(raced));
$("stop").addEventListener("click", () => running?.abort());
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send(answer);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.abort();
});
$("new-chat").addEventListener("click", () => {
  open(fresh());
  $("prompt").focus();
});
$("open-chats").addEventListener("click", () => {
  listChats();
  $("chats").showModal();
});
$("open-settings").addEventListener("click", () => $("settings").showModal());
$("key-dialog").addEventListener("close", () => {
  if (!$("key").value) return;
  key.set($("key").value);
  $("prompt").focus();
  meet();
});
for (const event of ["beforeunload", "pagehide"]) addEventListener(event, leave);
document.addEventListener("visibilitychange", () => document.hidden && keepUnfinished());
for (const id of KEPT_SETTINGS) $(id).addEventListener("input", settingsChanged);
// The slider is too coarse for the small budgets that pay on a CPU.
$("budget-number").addEventListener("change", () => {
  // An empty field is no budget: the one before holds.
  if ($("budget-number").value) $("budget").value = $("budget-number").value;
  settingsChanged();
});
$("shade").addEventListener("change", () => {
  for (const view of views) {
    view.shaded = $("shade").checked;
    view.draw();
  }
});

restoreSettings();
const [newest] = history.chats();
if (newest) open(newest);
meet();

// The npm clients against the server at the URL given: one JSON object of what they understood.
import Anthropic from "@anthropic-ai/sdk";
import OpenAI from "openai";

const url = process.argv[2];
const parameters = { type: "object", properties: { city: { type: "string" }, unit: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "get_weather", parameters } }];
const messages = [{ role: "user", content: "hi" }];
const found = {};

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const chat = await openai.chat.completions.create({ model: "toy", messages, tools });
found.chat = [chat.choices[0].message.content, JSON.parse(chat.choices[0].message.tool_calls[0].function.arguments)];
const streamed = await openai.chat.completions.stream({ model: "toy", messages, tools }).finalChatCompletion();
found.chatStream = [streamed.choices[0].message.content, JSON.parse(streamed.choices[0].message.tool_calls[0].function.arguments)];
const flat = [{ type: "function", name: "get_weather", parameters, strict: false }];
const response = await openai.responses.create({ model: "toy", input: "hi", tools: flat });
found.responses = [response.output_text, JSON.parse(response.output[1].arguments)];
const events = await openai.responses.stream({ model: "toy", input: "hi", tools: flat }).finalResponse();
found.responsesStream = [events.output_text, JSON.parse(events.output[1].arguments)];
try {
  await openai.chat.completions.create({ model: "toy", messages, temperature: 9 });
} catch (error) {
  found.error = [error.status, error.param];
}

const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const blocks = [{ name: "get_weather", input_schema: parameters }];
const message = await anthropic.messages.create({ model: "toy", max_tokens: 300, messages, tools: blocks });
found.messages = [message.content[0].text, message.content[1].input];
const final = await anthropic.messages.stream({ model: "toy", max_tokens: 300, messages, tools: blocks }).finalMessage();
found.messagesStream = [final.content[0].text, final.content[1].input];
found.counted = (await anthropic.messages.countTokens({ model: "toy", messages, tools: blocks })).input_tokens === message.usage.input_tokens;
console.log(JSON.stringify(found));

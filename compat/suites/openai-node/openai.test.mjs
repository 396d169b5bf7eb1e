// OpenAI's client for Node.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat, zodFunction } from "openai/helpers/zod";
import { z } from "zod";

const CHAT = "sim-chat";
const EMBED = "sim-embed";
const client = new OpenAI({
  baseURL: `${process.env.RKSERVE_URL}/v1`, apiKey: "unused", maxRetries: 0, timeout: 60000,
});
const user = (content) => [{ role: "user", content }];
const tool = (name, key) => ({
  type: "function",
  function: {
    name,
    description: name === "get_weather" ? "What the sky does" : "What the clock says",
    parameters: { type: "object", properties: { [key]: { type: "string" } }, required: [key] },
  },
});
const TOOLS = [tool("get_weather", "city"), tool("get_time", "zone")];

test("a chat is answered", async () => {
  const answer = await client.chat.completions.create({ model: CHAT, messages: user("Count to 5") });
  assert.equal(answer.choices[0].message.content, "1, 2, 3, 4, 5.");
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + answer.usage.completion_tokens);
});

test("a chat is streamed with its usage", async () => {
  const stream = await client.chat.completions.create({
    model: CHAT, messages: user("Repeat after me: crème 你好 👋🏽"), stream: true,
    stream_options: { include_usage: true },
  });
  let text = "", usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, "crème 你好 👋🏽");
  assert.ok(usage.completion_tokens > 3);
});

test("the stream helper collects the answer", async () => {
  const stream = client.chat.completions.stream({ model: CHAT, messages: user("Count to 4") });
  let pieces = "";
  stream.on("content", (delta) => { pieces += delta; });
  assert.equal(await stream.finalContent(), "1, 2, 3, 4.");
  assert.equal(pieces, "1, 2, 3, 4.");
});

test("a stream can be left", async () => {
  const stream = await client.chat.completions.create({
    model: CHAT, messages: user("Write 3000 tokens"), stream: true,
  });
  for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  assert.ok(stream.controller.signal.aborted);
});

test("n answers are n choices", async () => {
  const answer = await client.chat.completions.create({ model: CHAT, messages: user("Count to 2"), n: 3 });
  assert.deepEqual(answer.choices.map((one) => one.message.content), ["1, 2.", "1, 2.", "1, 2."]);
});

test("a stop string ends the answer before it", async () => {
  const answer = await client.chat.completions.create({
    model: CHAT, messages: user("Repeat after me: one two STOP three"), stop: ["STOP"],
  });
  assert.equal(answer.choices[0].message.content, "one two ");
});

test("a tool is called and its result is told", async () => {
  const messages = user("What is the weather in Oslo?");
  const answer = await client.chat.completions.create({ model: CHAT, messages, tools: TOOLS });
  const [call] = answer.choices[0].message.tool_calls;
  assert.equal(answer.choices[0].finish_reason, "tool_calls");
  assert.deepEqual(JSON.parse(call.function.arguments), { city: "Oslo" });
  messages.push(answer.choices[0].message, { role: "tool", tool_call_id: call.id, content: "3 degrees" });
  const last = await client.chat.completions.create({ model: CHAT, messages, tools: TOOLS });
  assert.equal(last.choices[0].message.content, "The tool answered: 3 degrees");
});

test("a call can be demanded, and a tool be named", async () => {
  for (const [choice, name] of [
    ["required", "get_weather"], [{ type: "function", function: { name: "get_time" } }, "get_time"],
  ]) {
    const answer = await client.chat.completions.create({
      model: CHAT, messages: user("Hello"), tools: TOOLS, tool_choice: choice,
    });
    assert.equal(answer.choices[0].message.tool_calls[0].function.name, name);
  }
});

test("calls are streamed in parallel", async () => {
  const stream = client.chat.completions.stream({
    model: CHAT, messages: user("Weather and time in parallel, in Oslo"), tools: TOOLS,
  });
  const final = await stream.finalChatCompletion();
  const calls = final.choices[0].message.tool_calls;
  assert.deepEqual(calls.map((one) => one.function.name), ["get_weather", "get_time"]);
  assert.deepEqual(calls.map((one) => JSON.parse(one.function.arguments)), [{ city: "Oslo" }, { zone: "Oslo" }]);
});

test("tools are run by the client", async () => {
  const seen = [];
  const runner = client.chat.completions.runTools({
    model: CHAT, messages: user("What is the weather in Oslo?"),
    tools: [zodFunction({
      name: "get_weather", description: "What the sky does", parameters: z.object({ city: z.string() }),
      function: ({ city }) => { seen.push(city); return `3 degrees in ${city}`; },
    })],
  });
  assert.match(await runner.finalContent(), /The tool answered: .*3 degrees in Oslo/);
  assert.deepEqual(seen, ["Oslo"]);
});

const Forecast = z.object({ city: z.string(), celsius: z.number().int(), sky: z.enum(["sun", "rain"]) });

test("an answer is parsed to a schema", async () => {
  const answer = await client.chat.completions.parse({
    model: CHAT, messages: user("The weather in Oslo"), response_format: zodResponseFormat(Forecast, "forecast"),
  });
  assert.equal(answer.choices[0].message.parsed.city, "Oslo");
});

test("a response is made, streamed, kept and gone on from", async () => {
  const first = await client.responses.create({ model: CHAT, input: "Hello there" });
  const stream = await client.responses.create({
    model: CHAT, input: "What did I say first?", previous_response_id: first.id, stream: true,
  });
  let text = "", id;
  for await (const event of stream) {
    if (event.type === "response.output_text.delta") text += event.delta;
    if (event.type === "response.completed") id = event.response.id;
  }
  assert.equal(text, 'You said first: "Hello there"');
  assert.equal((await client.responses.retrieve(id)).output_text, text);
});

test("a response calls a tool", async () => {
  const answer = await client.responses.create({
    model: CHAT, input: "What is the weather in Oslo?",
    tools: TOOLS.map((one) => ({ type: "function", strict: false, ...one.function })),
  });
  const call = answer.output.find((one) => one.type === "function_call");
  assert.deepEqual(JSON.parse(call.arguments), { city: "Oslo" });
});

test("a response is parsed to a schema", async () => {
  const answer = await client.responses.parse({
    model: CHAT, input: "The weather in Oslo", text: { format: zodTextFormat(Forecast, "forecast") },
  });
  assert.equal(answer.output_parsed.city, "Oslo");
});

test("texts become vectors", async () => {
  const answer = await client.embeddings.create({ model: EMBED, input: ["a cat", "a dog"] });
  assert.deepEqual(answer.data.map((one) => one.embedding.length), [64, 64]);
});

test("a prompt is completed with logprobs", async () => {
  const answer = await client.completions.create({ model: CHAT, prompt: "Count to 3", max_tokens: 20, logprobs: 1, temperature: 0 });
  assert.equal(answer.choices[0].text.trim(), "1, 2, 3.");
  // The hidden token that ends the answer is counted in the usage and has no entry.
  assert.equal(answer.choices[0].logprobs.tokens.join(""), answer.choices[0].text);
  assert.equal(answer.choices[0].logprobs.tokens.length, answer.usage.completion_tokens - 1);
});

test("the models are listed", async () => {
  const names = [];
  for await (const model of client.models.list()) names.push(model.id);
  assert.ok(names.includes(CHAT) && names.includes(EMBED));
  assert.equal((await client.models.retrieve(CHAT)).id, CHAT);
});

test("errors have their classes", async () => {
  await assert.rejects(
    client.chat.completions.create({ model: "gpt-4", messages: user("Hello") }),
    (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
  );
  await assert.rejects(
    client.chat.completions.create({ model: CHAT, messages: user("Hello"), temperature: 9 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
  );
});

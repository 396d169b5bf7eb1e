// Vercel's AI SDK with its provider for servers that speak as OpenAI's.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  APICallError, embed, embedMany, generateText, Output, stepCountIs, streamText, tool,
} from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const rkserve = createOpenAICompatible({
  name: "rkserve", baseURL: `${process.env.RKSERVE_URL}/v1`, apiKey: "unused",
  includeUsage: true, supportsStructuredOutputs: true,
});
const model = rkserve("sim-chat");
const weather = (seen) => tool({
  description: "What the sky does", inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => { seen.push(city); return `3 degrees in ${city}`; },
});
const Forecast = z.object({ city: z.string(), celsius: z.number().int(), sky: z.enum(["sun", "rain"]) });

test("text is generated", async () => {
  const { text, finishReason, usage } = await generateText({ model, prompt: "Count to 5" });
  assert.equal(text, "1, 2, 3, 4, 5.");
  assert.equal(finishReason, "stop");
  assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);
});

test("text is streamed with its usage", async () => {
  const result = streamText({ model, prompt: "Repeat after me: crème 你好 👋🏽" });
  let text = "";
  for await (const piece of result.textStream) text += piece;
  assert.equal(text, "crème 你好 👋🏽");
  assert.ok((await result.usage).outputTokens > 3);
  assert.equal(await result.finishReason, "stop");
});

test("a system prompt and a conversation reach the model", async () => {
  const { text } = await generateText({
    model, system: "You are Ferris.", messages: [
      { role: "user", content: "Hello there" }, { role: "assistant", content: "Hi." },
      { role: "user", content: "Who are you?" },
    ],
  });
  assert.equal(text, "I am Ferris.");
});

test("limits and stop strings are exact", async () => {
  const short = await generateText({ model, prompt: "Write 30 tokens", maxOutputTokens: 6 });
  assert.equal(short.finishReason, "length");
  assert.equal(short.usage.outputTokens, 6);
  const cut = await generateText({ model, prompt: "Repeat after me: one two STOP", stopSequences: ["STOP"] });
  assert.equal(cut.text.trim(), "one two");
});

test("a tool is run and its result is told", async () => {
  const seen = [];
  const { text, steps } = await generateText({
    model, prompt: "What is the weather in Oslo?", tools: { get_weather: weather(seen) },
    stopWhen: stepCountIs(3),
  });
  assert.deepEqual(seen, ["Oslo"]);
  assert.match(text, /The tool answered: .*3 degrees in Oslo/);
  assert.equal(steps.length, 2);
});

test("a tool is run in a stream", async () => {
  const seen = [], kinds = new Set();
  const result = streamText({
    model, prompt: "What is the weather in Oslo?", tools: { get_weather: weather(seen) },
    stopWhen: stepCountIs(3),
  });
  for await (const part of result.fullStream) kinds.add(part.type);
  assert.deepEqual(seen, ["Oslo"]);
  for (const kind of ["tool-input-start", "tool-call", "tool-result", "text-delta", "finish"])
    assert.ok(kinds.has(kind), kind);
  assert.match(await result.text, /3 degrees in Oslo/);
});

test("a call can be demanded, and a tool be named", async () => {
  const tools = { get_weather: weather([]), get_time: tool({ inputSchema: z.object({ zone: z.string() }) }) };
  const any = await generateText({ model, prompt: "Hello", tools, toolChoice: "required" });
  assert.equal(any.toolCalls.length, 1);
  const named = await generateText({ model, prompt: "Hello", tools, toolChoice: { type: "tool", toolName: "get_time" } });
  assert.equal(named.toolCalls[0].toolName, "get_time");
});

test("an answer is parsed to a schema", async () => {
  const { output } = await generateText({
    model, prompt: "The weather in Oslo", output: Output.object({ schema: Forecast }),
  });
  assert.equal(output.city, "Oslo");
});

test("a schema is streamed in parts", async () => {
  const { partialOutputStream, output } = streamText({
    model, prompt: "The weather in Oslo", output: Output.object({ schema: Forecast }),
  });
  let parts = 0;
  for await (const _ of partialOutputStream) parts += 1;
  assert.ok(parts > 1);
  assert.equal((await output).city, "Oslo");
});

test("one of several choices is made", async () => {
  const { output } = await generateText({
    model, prompt: "The weather in Oslo", output: Output.choice({ options: ["sun", "rain"] }),
  });
  assert.ok(["sun", "rain"].includes(output));
});

test("thoughts are told apart", async () => {
  const { text, reasoningText } = await generateText({
    model, prompt: "Count to 3", providerOptions: { rkserve: { reasoningEffort: "low" } },
  });
  assert.equal(text, "1, 2, 3.");
  assert.match(reasoningText, /The user wrote/);
});

test("images are seen", async () => {
  const png = Buffer.from(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==", "base64");
  const { text } = await generateText({
    model: rkserve("sim-vision"),
    messages: [{ role: "user", content: [{ type: "text", text: "Describe" }, { type: "image", image: png, mediaType: "image/png" }] }],
  });
  assert.match(text, /^The picture shows pattern/);
});

test("texts become vectors", async () => {
  const { embedding } = await embed({ model: rkserve.embeddingModel("sim-embed"), value: "a cat" });
  assert.equal(embedding.length, 64);
  const { embeddings } = await embedMany({ model: rkserve.embeddingModel("sim-embed"), values: ["a cat", "a dog"] });
  assert.equal(embeddings.length, 2);
});

test("a prompt is completed", async () => {
  // The SDK writes a dialogue around the prompt: the model goes on with that, not with the request.
  const { text, usage } = await generateText({ model: rkserve.completionModel("sim-chat"), prompt: "Count to 3", maxOutputTokens: 20 });
  assert.ok(text.length > 0);
  assert.equal(usage.outputTokens, 20);
});

test("errors tell what was wrong", async () => {
  await assert.rejects(
    generateText({ model: rkserve("gpt-4"), prompt: "Hello", maxRetries: 0 }),
    (error) => APICallError.isInstance(error) && error.statusCode === 404 && !error.isRetryable,
  );
});

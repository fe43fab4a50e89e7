// Loops of tool calls with the openai package for Node: `node openai_loop.cjs URL`.
// The Responses API, complete and streamed, and `runTools` of chat completions.
"use strict";
const OpenAI = require("openai");

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = "repeater";
const numbers = { a: { type: "integer" }, b: { type: "integer" } };
const parameters = { type: "object", properties: numbers };
const described = { name: "multiply", description: "Returns a product.", parameters };
const product = ({ a, b }) => String(a * b);

async function answerOf(fields, stream) {
  if (!stream) return client.responses.create(fields);
  return client.responses.stream(fields).finalResponse();
}

async function responses(stream) {
  const input = [{ role: "user", content: "Multiply." }];
  const tools = [{ type: "function", strict: false, ...described }];
  const results = [];
  for (;;) {
    const answer = await answerOf({ model, input, tools }, stream);
    input.push(...answer.output);
    const calls = answer.output.filter((item) => item.type === "function_call");
    if (calls.length === 0) return [results, answer.output_text];
    for (const call of calls) {
      const output = product(JSON.parse(call.arguments));
      results.push(output);
      input.push({ type: "function_call_output", call_id: call.call_id, output });
    }
  }
}

async function chat() {
  const run = { ...described, parse: JSON.parse, function: product };
  const runner = client.chat.completions.runTools(
    {
      model,
      messages: [{ role: "user", content: "Multiply." }],
      tools: [{ type: "function", function: run }],
    },
    { maxChatCompletions: 20 },
  );
  const text = await runner.finalContent();
  const results = runner.messages.filter((message) => message.role === "tool");
  return [results.map((message) => message.content), text];
}

(async () => {
  const loops = [await responses(false), await responses(true), await chat()];
  console.log(JSON.stringify(loops));
})();

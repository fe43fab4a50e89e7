// Loops of tool calls with Anthropic's package for Node: `node anthropic_loop.cjs URL`.
// `messages.create`, `messages.stream`, and the tool runner.
"use strict";
const Anthropic = require("@anthropic-ai/sdk");

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const numbers = { a: { type: "integer" }, b: { type: "integer" } };
const described = {
  name: "multiply",
  description: "Returns a product.",
  input_schema: { type: "object", properties: numbers },
};
const common = { model: "repeater", max_tokens: 500 };
const product = ({ a, b }) => String(a * b);
const textOf = (content) =>
  content
    .filter((block) => block.type === "text")
    .map((block) => block.text)
    .join("");

async function answerOf(fields, stream) {
  if (!stream) return client.messages.create(fields);
  return client.messages.stream(fields).finalMessage();
}

async function messages(stream) {
  const history = [{ role: "user", content: "Multiply." }];
  const results = [];
  for (;;) {
    const fields = { ...common, messages: history, tools: [described] };
    const { content } = await answerOf(fields, stream);
    history.push({ role: "assistant", content });
    const calls = content.filter((block) => block.type === "tool_use");
    if (calls.length === 0) return [results, textOf(content)];
    const blocks = calls.map((call) => {
      results.push(product(call.input));
      return { type: "tool_result", tool_use_id: call.id, content: product(call.input) };
    });
    history.push({ role: "user", content: blocks });
  }
}

async function runner() {
  const results = [];
  const run = (input) => {
    results.push(product(input));
    return product(input);
  };
  const last = await client.beta.messages.toolRunner({
    ...common,
    messages: [{ role: "user", content: "Multiply." }],
    tools: [{ type: "custom", ...described, run, parse: (input) => input }],
  });
  return [results, textOf(last.content)];
}

(async () => {
  const loops = [await messages(false), await messages(true), await runner()];
  console.log(JSON.stringify(loops));
})();

// Answers of a vision-language model with Anthropic's package for Node:
// `node anthropic_answers.cjs URL QUESTION IMAGE`.
"use strict";
const Anthropic = require("@anthropic-ai/sdk");
const { zodOutputFormat } = require("@anthropic-ai/sdk/helpers/zod");
const { z } = require("zod");

const [url, question, image] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const common = { model: "default", temperature: 0, max_tokens: 100 };
const Seen = z.object({ size: z.enum(["small", "large"]) });
const asked = [{ role: "user", content: question }];

async function errorOf(fields) {
  try {
    await client.messages.create({ ...common, messages: asked, ...fields });
    return null;
  } catch (error) {
    const { type, message } = error.error.error;
    return { status: error.status, name: type, field: message.split(":")[0] };
  }
}

(async () => {
  const data = image.split(",")[1];
  const source = { type: "base64", media_type: "image/png", data };
  const content = [
    { type: "text", text: question },
    { type: "image", source },
  ];
  const short = { ...common, max_tokens: 16, messages: [{ role: "user", content }] };
  const whole = await client.messages.create(short);
  let streamed = "";
  await client.messages
    .stream(short)
    .on("text", (part) => (streamed += part))
    .finalMessage();
  const output_config = { format: zodOutputFormat(Seen) };
  const parsed = await client.messages.parse({ ...common, messages: asked, output_config });
  const called = await client.messages.create({
    ...common,
    messages: asked,
    tools: [{ name: "draw", input_schema: z.toJSONSchema(Seen), strict: true }],
    tool_choice: { type: "tool", name: "draw" },
  });
  const { usage } = whole;
  const found = {
    whole: whole.content[0].text,
    streamed,
    tokens: usage.input_tokens + usage.cache_read_input_tokens,
    parsed: parsed.parsed_output,
    call: called.content[0].input,
    errors: [
      await errorOf({ model: "none" }),
      await errorOf({ temperature: 9 }),
      await errorOf({ mcp_servers: [{ name: "a" }] }),
    ],
  };
  console.log(JSON.stringify(found));
})();

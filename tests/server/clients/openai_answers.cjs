// Answers of a vision-language model with the openai package for Node:
// `node openai_answers.cjs URL QUESTION IMAGE`.
"use strict";
const OpenAI = require("openai");
const { zodTextFormat } = require("openai/helpers/zod");
const { z } = require("zod");

const [url, question, image] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const common = { model: "default", temperature: 0, max_output_tokens: 100 };
const Seen = z.object({ size: z.enum(["small", "large"]) });

async function errorOf(fields) {
  try {
    await client.responses.create({ ...common, input: "a", ...fields });
    return null;
  } catch (error) {
    return { status: error.status, name: error.constructor.name, field: error.param };
  }
}

(async () => {
  const content = [
    { type: "input_text", text: question },
    { type: "input_image", image_url: image, detail: "auto" },
  ];
  const input = [{ role: "user", content }];
  const short = { ...common, input, max_output_tokens: 16 };
  const whole = await client.responses.create(short);
  let streamed = "";
  for await (const event of await client.responses.create({ ...short, stream: true })) {
    if (event.type === "response.output_text.delta") streamed += event.delta;
  }
  const text = { format: zodTextFormat(Seen, "seen") };
  const parsed = await client.responses.parse({ ...common, input: question, text });
  const parameters = z.toJSONSchema(Seen);
  const called = await client.responses.create({
    ...common,
    input: question,
    tools: [{ type: "function", name: "draw", parameters, strict: true }],
    tool_choice: { type: "function", name: "draw" },
  });
  const found = {
    whole: whole.output_text,
    streamed,
    tokens: whole.usage.input_tokens,
    parsed: parsed.output_parsed,
    call: JSON.parse(called.output[0].arguments),
    errors: [
      await errorOf({ model: "none" }),
      await errorOf({ temperature: 9 }),
      await errorOf({ background: true }),
    ],
  };
  console.log(JSON.stringify(found));
})();

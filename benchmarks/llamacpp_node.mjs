// llama.cpp through npm's node-llama-cpp, whose prebuilt binaries use the processor's best instructions, behind the
// one route the benchmark needs: POST /v1/completions with token ids, greedy, streamed. All sequences share one
// context, which batches them continuously. Arguments: module directory, gguf, port, slots, tokens a slot, threads.
import http from "node:http";
import { pathToFileURL } from "node:url";
import path from "node:path";

const [modules, gguf, port, slots, context, threads] = process.argv.slice(2);
const entry = path.join(modules, "node-llama-cpp", "dist", "index.js");
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(entry).href);

const llama = await getLlama({ build: "never", gpu: false, maxThreads: +threads, logLevel: LlamaLogLevel.error });
const model = await llama.loadModel({ modelPath: gguf });
const shared = await model.createContext({
  contextSize: +context,
  sequences: +slots,
  batchSize: 2048,
  threads: +threads,
});
const free = Array.from({ length: +slots }, () => shared.getSequence());

async function complete(body, response) {
  const sequence = free.pop();
  if (!sequence) return response.writeHead(503).end();
  response.writeHead(200, { "Content-Type": "text/event-stream" });
  let count = 0;
  try {
    await sequence.clearHistory();
    for await (const token of sequence.evaluate(body.prompt, { temperature: 0, yieldEogToken: true })) {
      count += 1;
      response.write(`data: ${JSON.stringify({ choices: [{ index: 0, text: model.detokenize([token]) }] })}\n\n`);
      if (count >= body.max_tokens) break;
    }
    const usage = { prompt_tokens: body.prompt.length, completion_tokens: count };
    response.end(`data: ${JSON.stringify({ choices: [], usage })}\n\ndata: [DONE]\n\n`);
  } finally {
    free.push(sequence);
  }
}

const server = http.createServer((request, response) => {
  if (request.url === "/health") return response.end("{}");
  const parts = [];
  request.on("data", (part) => parts.push(part));
  request.on("end", () => complete(JSON.parse(Buffer.concat(parts)), response));
});
server.listen(+port, "127.0.0.1", () => console.log(`listening ${port}`));

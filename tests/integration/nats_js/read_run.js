// Reads what a run left in JetStream with an independent client, and verifies every object of its newest policy.
//
//   node read_run.js URL KEY_FILE RUN
//
// Prints one JSON object: the streams, the newest policy's manifest, and the objects of that policy.

import { createHash } from "node:crypto";
import { readFileSync } from "node:fs";
import { connect, nkeyAuthenticator } from "@nats-io/transport-node";
import { jetstream, jetstreamManager } from "@nats-io/jetstream";
import { Kvm } from "@nats-io/kv";
import { Objm } from "@nats-io/obj";

const [url, keyFile, run] = process.argv.slice(2);
const seed = new TextEncoder().encode(readFileSync(keyFile, "utf8").trim());
const connection = await connect({
  servers: url,
  authenticator: nkeyAuthenticator(seed),
  timeout: 10_000,
});

const streams = [];
for await (const { config, state } of (await jetstreamManager(connection)).streams.list()) {
  streams.push({
    name: config.name,
    description: config.description ?? "",
    metadata: config.metadata ?? {},
    retention: config.retention,
    discard: config.discard,
    storage: config.storage,
    subjects: config.subjects ?? [],
    messages: state.messages,
  });
}

const policies = await new Kvm(jetstream(connection)).open(`aether-${run}-policies`);
const versions = [];
for await (const key of await policies.keys()) {
  if (/^\d+$/.test(key)) versions.push(Number(key));
}
versions.sort((a, b) => a - b);
const policy = (await policies.get(String(versions.at(-1)))).json();

const store = await new Objm(jetstream(connection)).open(`aether-${run}-artifacts`);
const objects = [];
for (const name of [policy.adapter, ...policy.files.map(([, , sha256]) => sha256)]) {
  const info = await store.info(name);
  const content = await store.getBlob(name);
  const hash = createHash("sha256").update(content);
  const hex = hash.copy().digest("hex");
  objects.push({
    name,
    description: info.description ?? "",
    size: content.length,
    sha256: hex,
    name_matches: hex === name,
    // The store's own digest: "SHA-256=" and padded base64url.
    digest_matches: info.digest === `SHA-256=${hash.digest("base64").replaceAll("+", "-").replaceAll("/", "_")}`,
  });
}

await connection.close();
console.log(JSON.stringify({ streams, versions, policy, objects }));

//! Restores a control plane's initial etcd data while all components run.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, bail};
use base64::{Engine, prelude::BASE64_STANDARD};
use reqwest::Client;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::Cluster;

/// Keys that the control plane itself writes continuously.
const OWN: [&str; 4] = [
    "/registry/leases/",
    "/registry/masterleases/",
    "/registry/minions/",
    "/registry/apiregistration.k8s.io/",
];
/// The API server's compaction revision. The API server exits if it decreases.
const COMPACTED: &str = "compact_rev_key";
const POLICIES: &str = "/registry/validatingadmissionpolicies/";
/// Interval between checks of a newly started control plane.
const SETTLING: Duration = Duration::from_millis(700);
/// Interval between checks that find no change.
const QUIET: Duration = Duration::from_millis(200);
/// Interval at which the API server reads its admission policies.
const POLICIES_READ: Duration = Duration::from_millis(1500);
const ROUNDS: usize = 100;
/// Maximum number of operations in one etcd transaction.
const WRITES_MOST: usize = 128;

/// The content of etcd right after a control plane has started.
#[derive(Debug)]
pub(crate) struct Start {
    etcd: Etcd,
    entries: BTreeMap<String, Entry>,
}

#[derive(Debug)]
struct Entry {
    /// In base64. Empty in a list of keys.
    value: String,
    /// The etcd revision of the latest write.
    revision: String,
}

#[derive(Debug)]
struct Etcd {
    client: Client,
    address: String,
}

impl Start {
    /// Waits until the control plane adds no more keys.
    pub(crate) async fn of(cluster: &Cluster) -> Result<Self> {
        let etcd = Etcd {
            client: Client::new(),
            address: format!("http://127.0.0.1:{}/v3/kv", cluster.etcd_port.number()),
        };
        let mut before = BTreeMap::new();
        for _ in 0..ROUNDS {
            sleep(SETTLING).await;
            let mut entries = etcd.entries(false).await?;
            entries.remove(COMPACTED);
            if entries.keys().eq(before.keys()) {
                return Ok(Self { etcd, entries });
            }
            before = entries;
        }
        bail!("{} does not settle", etcd.address)
    }

    /// Deletes new keys and restores the others, until two checks find no difference.
    pub(crate) async fn restore(&mut self) -> Result<()> {
        let (mut quiet, mut policies) = (0, false);
        for _ in 0..ROUNDS {
            let mut now = self.etcd.entries(true).await?;
            now.remove(COMPACTED);
            let added = now.keys().filter(|key| !self.entries.contains_key(*key));
            let added: Vec<_> = added.cloned().collect();
            policies |= added.iter().any(|key| key.starts_with(POLICIES));
            let other = |(key, entry): &(&String, &Entry)| match now.get(*key) {
                Some(now) => now.revision != entry.revision && !is_own(key),
                None => true,
            };
            let changed = self.entries.iter().filter(other);
            let changed: Vec<_> = changed.map(|(key, _)| key.clone()).collect();
            if added.is_empty() && changed.is_empty() {
                quiet += 1;
            } else {
                quiet = 0;
                self.write(&added, &changed).await?;
            }
            if quiet == 2 {
                if policies {
                    sleep(POLICIES_READ).await;
                }
                return Ok(());
            }
            sleep(QUIET).await;
        }
        bail!("{} does not become quiet", self.etcd.address)
    }

    async fn write(&mut self, added: &[String], changed: &[String]) -> Result<()> {
        for keys in added.chunks(WRITES_MOST) {
            let delete = |key| json!({"requestDeleteRange": {"key": encoded(key)}});
            self.etcd.transaction(keys.iter().map(delete)).await?;
        }
        for keys in changed.chunks(WRITES_MOST) {
            let put = |key| {
                let value = &self.entries[key].value;
                json!({"requestPut": {"key": encoded(key), "value": value}})
            };
            let revision = self.etcd.transaction(keys.iter().map(put)).await?;
            for key in keys {
                if let Some(entry) = self.entries.get_mut(key) {
                    entry.revision.clone_from(&revision);
                }
            }
        }
        Ok(())
    }
}

impl Etcd {
    async fn entries(&self, keys_only: bool) -> Result<BTreeMap<String, Entry>> {
        // The complete key range.
        let all = json!({"key": "AA==", "range_end": "AA==", "keys_only": keys_only});
        let answer = self.ask("range", &all).await?;
        let text = |pair: &Value, field: &str| pair[field].as_str().unwrap_or_default().to_owned();
        let pairs = answer["kvs"].as_array().context("etcd has no keys")?;
        let entry = |pair| {
            let key = BASE64_STANDARD.decode(text(pair, "key"))?;
            let entry = Entry {
                value: text(pair, "value"),
                revision: text(pair, "mod_revision"),
            };
            Ok((String::from_utf8(key)?, entry))
        };
        pairs.iter().map(entry).collect()
    }

    /// Returns the revision of these writes.
    async fn transaction(&self, writes: impl Iterator<Item = Value>) -> Result<String> {
        let writes: Vec<Value> = writes.collect();
        let answer = self.ask("txn", &json!({"success": writes})).await?;
        let revision = answer.pointer("/header/revision").and_then(Value::as_str);
        Ok(revision.context("etcd returned no revision")?.to_owned())
    }

    async fn ask(&self, operation: &str, body: &Value) -> Result<Value> {
        let url = format!("{}/{operation}", self.address);
        let asked = self.client.post(url).body(body.to_string());
        let answer = asked.send().await?.error_for_status()?.text().await?;
        Ok(serde_json::from_str(&answer)?)
    }
}

fn is_own(key: &str) -> bool {
    OWN.iter().any(|own| key.starts_with(own))
}

fn encoded(key: &String) -> String {
    BASE64_STANDARD.encode(key)
}

//! Restores a control plane's initial etcd data while all components run.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result, bail};
use base64::{Engine, prelude::BASE64_STANDARD};
use reqwest::Client;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::Cluster;

/// Keys that the control plane itself writes continuously.
const CONTINUOUS_KEYS: [&str; 4] = [
    "/registry/leases/",
    "/registry/masterleases/",
    "/registry/minions/",
    "/registry/apiregistration.k8s.io/",
];
/// The API server's compaction revision. The API server exits if it decreases.
const COMPACTION_KEY: &str = "compact_rev_key";
const POLICY_KEYS: &str = "/registry/validatingadmissionpolicies/";
/// Interval between checks of a newly started control plane.
const SETTLE_INTERVAL: Duration = Duration::from_millis(700);
/// Interval between checks that find no change.
const QUIET_INTERVAL: Duration = Duration::from_millis(200);
/// Interval at which the API server reads its admission policies.
const POLICY_READ_INTERVAL: Duration = Duration::from_millis(1500);
const MAX_ROUNDS: usize = 100;
/// Maximum number of operations in one etcd transaction.
const MAX_WRITES: usize = 128;

/// The content of etcd right after a control plane has started.
#[derive(Debug)]
pub(crate) struct InitialState {
    etcd: Etcd,
    entries: BTreeMap<String, EtcdEntry>,
}

#[derive(Debug)]
struct EtcdEntry {
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

impl InitialState {
    /// Waits until the control plane adds no more keys.
    pub(crate) async fn capture(cluster: &Cluster) -> Result<Self> {
        let etcd = Etcd {
            client: Client::new(),
            address: format!("http://127.0.0.1:{}/v3/kv", cluster.etcd_port.number()),
        };
        let mut previous = BTreeMap::new();
        for _ in 0..MAX_ROUNDS {
            sleep(SETTLE_INTERVAL).await;
            let mut entries = etcd.entries(false).await?;
            entries.remove(COMPACTION_KEY);
            if entries.keys().eq(previous.keys()) {
                return Ok(Self { etcd, entries });
            }
            previous = entries;
        }
        bail!("{} does not settle", etcd.address)
    }

    /// Deletes new keys and restores the others, until two checks find no difference.
    pub(crate) async fn restore(&mut self) -> Result<()> {
        let (mut quiet_checks, mut has_new_policies) = (0, false);
        for _ in 0..MAX_ROUNDS {
            let mut current = self.etcd.entries(true).await?;
            current.remove(COMPACTION_KEY);
            let added = current
                .keys()
                .filter(|key| !self.entries.contains_key(*key));
            let added: Vec<_> = added.cloned().collect();
            has_new_policies |= added.iter().any(|key| key.starts_with(POLICY_KEYS));
            let differs = |(key, entry): &(&String, &EtcdEntry)| match current.get(*key) {
                Some(current) => current.revision != entry.revision && !is_continuous(key),
                None => true,
            };
            let changed = self.entries.iter().filter(differs);
            let changed: Vec<_> = changed.map(|(key, _)| key.clone()).collect();
            if added.is_empty() && changed.is_empty() {
                quiet_checks += 1;
            } else {
                quiet_checks = 0;
                self.write(&added, &changed).await?;
            }
            if quiet_checks == 2 {
                if has_new_policies {
                    sleep(POLICY_READ_INTERVAL).await;
                }
                return Ok(());
            }
            sleep(QUIET_INTERVAL).await;
        }
        bail!("{} does not become quiet", self.etcd.address)
    }

    async fn write(&mut self, added: &[String], changed: &[String]) -> Result<()> {
        for keys in added.chunks(MAX_WRITES) {
            let delete = |key| json!({"requestDeleteRange": {"key": encoded(key)}});
            self.etcd.transaction(keys.iter().map(delete)).await?;
        }
        for keys in changed.chunks(MAX_WRITES) {
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
    async fn entries(&self, keys_only: bool) -> Result<BTreeMap<String, EtcdEntry>> {
        // The complete key range.
        let all = json!({"key": "AA==", "range_end": "AA==", "keys_only": keys_only});
        let response = self.post("range", &all).await?;
        let text = |pair: &Value, field: &str| pair[field].as_str().unwrap_or_default().to_owned();
        let pairs = response["kvs"].as_array().context("etcd has no keys")?;
        let entry = |pair| {
            let key = BASE64_STANDARD.decode(text(pair, "key"))?;
            let entry = EtcdEntry {
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
        let response = self.post("txn", &json!({"success": writes})).await?;
        let revision = response.pointer("/header/revision").and_then(Value::as_str);
        Ok(revision.context("etcd returned no revision")?.to_owned())
    }

    async fn post(&self, operation: &str, body: &Value) -> Result<Value> {
        let url = format!("{}/{operation}", self.address);
        let request = self.client.post(url).body(body.to_string());
        let response = request.send().await?.error_for_status()?.text().await?;
        Ok(serde_json::from_str(&response)?)
    }
}

fn is_continuous(key: &str) -> bool {
    CONTINUOUS_KEYS.iter().any(|own| key.starts_with(own))
}

fn encoded(key: &String) -> String {
    BASE64_STANDARD.encode(key)
}

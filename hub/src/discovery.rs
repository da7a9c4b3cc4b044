//! Labelled kubeconfig Secrets on home: which there are now, and what each holds.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Secret;
use krypton_agent::watch_backoff::WatchBackoff;
use krypton_common::error_chain::chain;
use krypton_common::kubeconfig::{self, Policy, Sanitized};
use krypton_common::names;
use kube::Client;
use kube::api::Api;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Config, Event, watcher};
use tokio::sync::watch;

use crate::settings::Discovery;

/// A kubeconfig Secret, read. A bad one is a member all the same: it is shown with its fault.
#[derive(Clone, Debug)]
pub struct Source {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub access: Result<Arc<Sanitized>, String>,
}

impl PartialEq for Source {
    fn eq(&self, other: &Self) -> bool {
        let digest = |source: &Self| source.access.clone().map(|access| access.digest.clone());
        (&self.namespace, &self.name, &self.uid) == (&other.namespace, &other.name, &other.uid)
            && digest(self) == digest(other)
    }
}

/// The Secrets by member name; `None` until the first list is complete.
pub type Sources = Option<Arc<BTreeMap<String, Source>>>;

/// Reads one Secret. Errors name the Secret, the key and the remedy.
pub fn read(secret: &Secret, key: &str, policy: &Policy) -> Option<Source> {
    let meta = &secret.metadata;
    let name = meta.name.clone()?;
    let namespace = meta.namespace.clone().unwrap_or_default();
    let access = match secret.data.as_ref().and_then(|data| data.get(key)) {
        None => Err(format!(
            "Secret {namespace}/{name} has no key {key:?}: put the cluster's kubeconfig there, or name another key with --kubeconfig-key"
        )),
        Some(bytes) => kubeconfig::parse(&bytes.0, policy)
            .map(Arc::new)
            .map_err(|error| format!("Secret {namespace}/{name}, key {key:?}: {}", chain(&error))),
    };
    Some(Source {
        namespace,
        name,
        uid: meta.uid.clone().unwrap_or_default(),
        access,
    })
}

/// Follows the Secrets until the process ends.
pub async fn follow(
    client: Client,
    namespace: String,
    discovery: Discovery,
    policy: Policy,
    sources: watch::Sender<Sources>,
) {
    let api: Api<Secret> = Api::namespaced(client, &namespace);
    let config = Config::default().labels(&format!("{}=true", discovery.label));
    let mut events = watcher(api, config)
        .backoff(WatchBackoff::default())
        .boxed();
    let mut known: BTreeMap<String, Source> = BTreeMap::new();
    let mut listing: BTreeMap<String, Source> = BTreeMap::new();
    let read = |secret: &Secret| {
        let source = read(secret, &discovery.key, &policy)?;
        if source.name == names::SELF_CLUSTER {
            tracing::info!(
                "Secret {}/{} stands for the home cluster itself; its content is not used",
                source.namespace,
                source.name
            );
            return None;
        }
        Some(source)
    };
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => {
                listing.clear();
                continue;
            }
            Ok(Event::InitApply(secret)) => {
                listing.extend(read(&secret).map(|source| (source.name.clone(), source)));
                continue;
            }
            Ok(Event::InitDone) => known = std::mem::take(&mut listing),
            Ok(Event::Apply(secret)) => {
                known.extend(read(&secret).map(|source| (source.name.clone(), source)));
            }
            Ok(Event::Delete(secret)) => {
                known.remove(secret.metadata.name.as_deref().unwrap_or_default());
            }
            Err(error) => {
                tracing::warn!(error = %chain(&error), %namespace, "watching kubeconfig Secrets failed; it is tried again");
                continue;
            }
        }
        let now = Some(Arc::new(known.clone()));
        sources.send_if_modified(|before| {
            let changed = *before != now;
            *before = now;
            changed
        });
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::ByteString;

    use super::*;

    #[test]
    fn a_secret_without_the_key_is_a_member_with_a_fault_that_names_both() {
        let mut secret = Secret::default();
        secret.metadata.name = Some("edge-1".to_owned());
        secret.metadata.namespace = Some("krypton".to_owned());
        secret.data = Some([("other".to_owned(), ByteString(Vec::new()))].into());
        let fault = read(&secret, "kubeconfig", &Policy::default())
            .unwrap()
            .access
            .unwrap_err();
        assert!(fault.contains("krypton/edge-1"), "{fault}");
        assert!(fault.contains("\"kubeconfig\""), "{fault}");
    }
}

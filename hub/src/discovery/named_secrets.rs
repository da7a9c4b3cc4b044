//! Kubeconfig Secrets that KryptonDeployments reference by name. Each has its own watch by name, so the hub
//! reads no other Secret.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use futures::future::BoxFuture;
use futures::{FutureExt as _, StreamExt as _};
use k8s_openapi::api::core::v1::Secret;
use krypton_runtime::newest::{Newest as _, NewestSeen as _};
use krypton_types::conditions::reason;
use krypton_types::error_chain::chain;
use krypton_types::kubeconfig::Policy;
use krypton_types::names;
use kube::runtime::watcher::{Config, Event};
use kube::{Client, ResourceExt as _};
use tokio::sync::{Notify, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::listed::{self, Listed};
use super::{Finds, Kind, Origin, Provider, Source, Unresolved};
use crate::discovery::kubeconfig_secret;

/// A Secret on the home cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SecretName {
    pub namespace: String,
    pub name: String,
}

impl SecretName {
    pub fn origin(&self) -> Origin {
        Origin {
            kind: Kind::Secret,
            namespace: Some(self.namespace.clone()),
            name: self.name.clone(),
        }
    }
}

impl fmt::Display for SecretName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// How a Secret is referenced.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Naming {
    /// The key of the kubeconfig, instead of the default key.
    pub key: Option<String>,
    /// Whether a user with the right to do so references it. Otherwise it is a member only if it is open to
    /// all.
    pub trusted: bool,
}

/// All referenced Secrets; `None` until they are known.
pub type Named = Option<Arc<BTreeMap<SecretName, Naming>>>;

/// The state of a referenced Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    There {
        /// The requested member name.
        member: String,
        /// Whether every user who may reference any Secret may reference this one.
        open: bool,
    },
    NotThere,
    /// Not read yet, with the cause.
    Unread(String),
}

/// The findings of all referenced Secrets that were read.
pub type Findings = Arc<BTreeMap<SecretName, Finding>>;

/// Provider of the referenced Secrets.
pub struct NamedSecrets {
    pub client: Client,
    pub named: watch::Receiver<Named>,
    pub findings: watch::Sender<Findings>,
    /// Discovery label. A member with it is open to all namespaces that its EdgeCluster allows.
    pub label: String,
    /// Key of the kubeconfig, unless an annotation or the reference names another.
    pub key: String,
    pub policy: Policy,
}

/// The last read Secret, and why it may be outdated.
#[derive(Debug, Default)]
struct Slot {
    /// `None` until the first read.
    secret: Option<Option<Secret>>,
    trouble: Option<String>,
    /// Number of watch events.
    told: u64,
    /// Number of changes of any kind.
    changes: u64,
}

/// The parsed content of a Secret after this many changes, once for each reference.
#[derive(Debug)]
struct Reading {
    naming: Naming,
    changes: Option<u64>,
    finding: Option<Finding>,
    source: Option<Arc<Source>>,
}

type Slots = Arc<(Mutex<BTreeMap<SecretName, Slot>>, Notify)>;

impl fmt::Debug for NamedSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe())
    }
}

impl Provider for NamedSecrets {
    fn describe(&self) -> String {
        "Secrets that KryptonDeployments name".to_owned()
    }

    fn covers(&self, origin: &Origin) -> bool {
        let Some(namespace) = origin
            .namespace
            .clone()
            .filter(|_| origin.kind == Kind::Secret)
        else {
            return false;
        };
        let name = SecretName {
            namespace,
            name: origin.name.clone(),
        };
        let named = self.named.get();
        named.as_ref().is_none_or(|named| named.contains_key(&name))
    }

    /// Creating or deleting a KryptonDeployment does not request the member again.
    fn marks(&self) -> bool {
        false
    }

    fn follow(self: Arc<Self>, finds: Finds) -> BoxFuture<'static, ()> {
        async move { self.run(&finds).await }.boxed()
    }
}

impl NamedSecrets {
    async fn run(&self, finds: &Finds) {
        let slots = Slots::default();
        let mut following: BTreeMap<SecretName, DropGuard> = BTreeMap::new();
        let mut readings = BTreeMap::new();
        let mut changed = self.named.clone();
        loop {
            let named = changed.see();
            if let Some(named) = &named {
                following.retain(|name, _| named.contains_key(name));
                slots
                    .0
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .retain(|name, _| named.contains_key(name));
                for name in named.keys() {
                    if !following.contains_key(name) {
                        let stop = CancellationToken::new();
                        let follow = follow(self.client.clone(), name.clone(), Arc::clone(&slots));
                        tokio::spawn({
                            let stop = stop.clone();
                            async move { stop.run_until_cancelled(follow).await }
                        });
                        following.insert(name.clone(), stop.drop_guard());
                    }
                }
                self.look(named, &slots, &mut readings);
                self.tell(finds, &readings);
            }
            tokio::select! {
                next = changed.changed() => if next.is_err() { return },
                () = slots.1.notified() => {}
                origin = finds.doubted() => {
                    let Some(namespace) = origin.namespace.clone() else { continue };
                    let name = SecretName { namespace, name: origin.name.clone() };
                    let told = told(&slots, &name);
                    if following.contains_key(&name)
                        && let Some(secret) = kubeconfig_secret::again(&self.client, &origin, &name.name).await
                    {
                        // A watch event that arrived since the read is newer.
                        put(&slots, &name, |slot| {
                            if slot.told == told {
                                slot.secret = Some(Some(secret));
                            }
                        });
                    }
                }
            }
        }
    }

    /// Reads the changed Secrets and returns their number.
    fn look(
        &self,
        named: &BTreeMap<SecretName, Naming>,
        slots: &Slots,
        readings: &mut BTreeMap<SecretName, Reading>,
    ) -> usize {
        readings.retain(|name, _| named.contains_key(name));
        let slots = slots.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut read = 0;
        for (name, naming) in named {
            let slot = slots.get(name);
            let changes = slot.map(|slot| slot.changes);
            let same = |it: &Reading| it.naming == *naming && it.changes == changes;
            if readings.get(name).is_some_and(same) {
                continue;
            }
            read += 1;
            let (finding, source) = self.read(name, naming, slot);
            let reading = Reading {
                naming: naming.clone(),
                changes,
                finding,
                source: source.map(Arc::new),
            };
            readings.insert(name.clone(), reading);
        }
        read
    }

    fn tell(&self, finds: &Finds, readings: &BTreeMap<SecretName, Reading>) {
        let mut findings = BTreeMap::new();
        let mut sources = BTreeMap::new();
        for (name, reading) in readings {
            let finding = reading.finding.clone();
            findings.extend(finding.map(|finding| (name.clone(), finding)));
            let source = reading.source.clone();
            sources.extend(source.map(|source| (name.origin(), source)));
        }
        // Publish the member first: a reader of the finding looks up the member next.
        finds.found(sources);
        self.findings.send_if_modified(|before| {
            let news = **before != findings;
            if news {
                *before = Arc::new(findings);
            }
            news
        });
    }

    /// Returns the finding for a Secret, and its member.
    fn read(
        &self,
        name: &SecretName,
        naming: &Naming,
        slot: Option<&Slot>,
    ) -> (Option<Finding>, Option<Source>) {
        let slot = slot.filter(|slot| slot.secret.is_some() || slot.trouble.is_some());
        let Some(slot) = slot else {
            let source = pending(name, format!("Secret {name} is being looked for"));
            return (None, naming.trusted.then_some(source));
        };
        let Some(secret) = &slot.secret else {
            let why = slot.trouble.clone().unwrap_or_default();
            let source = pending(name, format!("Secret {name} cannot be read: {why}"));
            return (Some(Finding::Unread(why)), naming.trusted.then_some(source));
        };
        let there = secret
            .as_ref()
            .filter(|secret| secret.metadata.deletion_timestamp.is_none());
        let Some(secret) = there else {
            return (Some(Finding::NotThere), None);
        };
        let source = self.source(name, naming, secret, slot.trouble.as_deref());
        let labelled = |label: &str| secret.labels().get(label).map(String::as_str) == Some("true");
        let open = labelled(&self.label) || labelled(names::OPEN_TO_DEPLOYMENTS_LABEL);
        let finding = Finding::There {
            member: source.member.clone(),
            open,
        };
        (Some(finding), (naming.trusted || open).then_some(source))
    }

    fn source(
        &self,
        name: &SecretName,
        naming: &Naming,
        secret: &Secret,
        trouble: Option<&str>,
    ) -> Source {
        let annotation = |key| secret.annotations().get(key).cloned();
        let key = naming
            .key
            .clone()
            .or_else(|| annotation(names::KUBECONFIG_KEY_ANNOTATION))
            .unwrap_or_else(|| self.key.clone());
        let missing = ": put the cluster's kubeconfig there, or name another key with spec.region.kubeconfig.secret.key of the KryptonDeployment";
        let origin = name.origin();
        let object = origin.to_string();
        Source {
            access: kubeconfig_secret::kubeconfig(secret, &object, &key, missing, &self.policy),
            origin,
            uid: secret.metadata.uid.clone().unwrap_or_default(),
            member: annotation(names::MEMBER_NAME_ANNOTATION).unwrap_or_else(|| name.name.clone()),
            since: secret.metadata.creation_timestamp.as_ref().map(|it| it.0),
            stale: trouble.map(|why| Unresolved {
                reason: reason::SOURCE_UNAVAILABLE,
                message: format!(
                    "{object} cannot be looked at now; what is known of it stands: {why}"
                ),
            }),
            suspended: None,
        }
    }
}

/// A source without access yet. The next read shows whether it exists.
fn pending(name: &SecretName, message: String) -> Source {
    Source {
        origin: name.origin(),
        uid: String::new(),
        member: name.name.clone(),
        since: None,
        access: Err(Unresolved {
            reason: reason::STARTING,
            message,
        }),
        stale: None,
        suspended: None,
    }
}

fn told(slots: &Slots, name: &SecretName) -> u64 {
    let all = slots.0.lock().unwrap_or_else(PoisonError::into_inner);
    all.get(name).map_or(0, |slot| slot.told)
}

fn put(slots: &Slots, name: &SecretName, change: impl FnOnce(&mut Slot)) {
    let mut all = slots.0.lock().unwrap_or_else(PoisonError::into_inner);
    let slot = all.entry(name.clone()).or_default();
    change(slot);
    slot.changes += 1;
    drop(all);
    slots.1.notify_one();
}

/// Watches one Secret.
async fn follow(client: Client, name: SecretName, slots: Slots) {
    let api = kubeconfig_secret::of(&client, Some(&name.namespace));
    let config = Config::default().fields(&format!("metadata.name={}", name.name));
    let mut events = listed::watch(api, config);
    let mut listed: Listed<Secret> = Listed::default();
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => {
                let relevant =
                    matches!(event, Event::InitDone | Event::Apply(_) | Event::Delete(_));
                listed.take(event, Some);
                if let Some(known) = listed.known().filter(|_| relevant) {
                    let secret = known.values().next().cloned();
                    put(&slots, &name, |slot| {
                        slot.secret = Some(secret);
                        slot.trouble = None;
                        slot.told += 1;
                    });
                }
            }
            Err(error) => {
                tracing::warn!(secret = %name, error = %chain(&error), "watching failed; it is tried again");
                put(&slots, &name, |slot| slot.trouble = Some(chain(&error)));
            }
        }
    }
}

#[cfg(test)]
mod tests;

//! Kubeconfig Secrets that KryptonDeployments reference by name. Each has its own watch by name, so the hub
//! reads no other Secret.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;
use futures::stream::{BoxStream, SelectAll};
use futures::{FutureExt as _, Stream, StreamExt as _};
use k8s_openapi::api::core::v1::Secret;
use krypton_runtime::newest::{Newest as _, NewestSeen as _, PutNews as _};
use krypton_runtime::periodic::FailureLog;
use krypton_runtime::watch::Watch;
use krypton_runtime::watch::store::Store;
use krypton_types::conditions::reason;
use krypton_types::error_chain::chain;
use krypton_types::kubeconfig::Policy;
use krypton_types::names;
use kube::runtime::watcher::Config;
use kube::{Client, ResourceExt as _};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::kubeconfig_secret;
use super::provider::{self, BATCH, Discovery, by_origin, secrets};
use super::{Finds, Kind, Origin, Provider, Source, Unresolved};

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
    /// The parsed Secret. `None` after a change of the other fields.
    reading: Option<Reading>,
}

/// A parsed Secret, as this reference requires.
#[derive(Debug)]
struct Reading {
    naming: Naming,
    finding: Option<Finding>,
    source: Option<Arc<Source>>,
}

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
        let mut named = self.named.clone();
        // The first names count as a change.
        named.mark_changed();
        let watches = NamedList {
            provider: self,
            named,
            watches: SelectAll::new(),
            watched: BTreeMap::new(),
            slots: BTreeMap::new(),
        };
        provider::run(watches, finds).boxed()
    }
}

type SecretEvent = (SecretName, Result<Option<Secret>, String>);

/// A watch of each referenced Secret.
struct NamedList {
    provider: Arc<NamedSecrets>,
    named: watch::Receiver<Named>,
    watches: SelectAll<BoxStream<'static, SecretEvent>>,
    /// Each guard ends its watch when it is dropped.
    watched: BTreeMap<SecretName, DropGuard>,
    slots: BTreeMap<SecretName, Slot>,
}

impl NamedList {
    /// Starts and ends watches by the referenced names.
    fn follow(&mut self, named: &BTreeMap<SecretName, Naming>) {
        self.watched.retain(|name, _| named.contains_key(name));
        for name in named.keys() {
            if !self.watched.contains_key(name) {
                let stop = CancellationToken::new();
                let watch = watch_one(&self.provider.client, name);
                let watch = watch.take_until(stop.clone().cancelled_owned());
                self.watches.push(watch.boxed());
                self.watched.insert(name.clone(), stop.drop_guard());
            }
        }
    }
}

impl Discovery for NamedList {
    async fn changed(&mut self) -> bool {
        tokio::select! {
            next = self.named.changed() => {
                if let Some(named) = self.named.see() {
                    self.follow(&named);
                }
                next.is_ok()
            }
            Some((name, event)) = self.watches.next(), if !self.watches.is_empty() => {
                self.slots.entry(name).or_default().take(event);
                for _ in 0..BATCH {
                    let Some(Some((name, event))) = self.watches.next().now_or_never() else {
                        break;
                    };
                    self.slots.entry(name).or_default().take(event);
                }
                true
            }
        }
    }

    async fn reread(&mut self, origin: &Origin) {
        let name = SecretName {
            namespace: origin.namespace.clone().unwrap_or_default(),
            name: origin.name.clone(),
        };
        if self.watched.contains_key(&name)
            && let Some(secret) =
                kubeconfig_secret::again(&self.provider.client, origin, &name.name).await
        {
            let slot = self.slots.entry(name).or_default();
            (slot.secret, slot.reading) = (Some(Some(secret)), None);
        }
    }

    fn sources(&mut self) -> Option<BTreeMap<Origin, Arc<Source>>> {
        let named = self.named.get()?;
        self.provider.read_changed(&named, &mut self.slots);
        let sources = self.slots.values().filter_map(|it| it.reading.as_ref());
        Some(by_origin(sources.filter_map(|it| it.source.as_ref())))
    }

    fn trouble(&self) -> Option<String> {
        None
    }

    /// A reader of a finding looks up the member next, so the member comes first.
    fn published(&mut self) {
        let finding = |(name, slot): (&SecretName, &Slot)| {
            let finding = slot.reading.as_ref()?.finding.clone()?;
            Some((name.clone(), finding))
        };
        let findings = self.slots.iter().filter_map(finding).collect();
        self.provider.findings.put(Arc::new(findings));
    }
}

impl Slot {
    fn take(&mut self, event: Result<Option<Secret>, String>) {
        self.reading = None;
        match event {
            Ok(secret) => (self.secret, self.trouble) = (Some(secret), None),
            Err(why) => self.trouble = Some(why),
        }
    }
}

/// Watches one Secret.
fn watch_one(client: &Client, name: &SecretName) -> impl Stream<Item = SecretEvent> + use<> {
    let config = Config::default().fields(&format!("metadata.name={}", name.name));
    let watch = Watch::of(secrets(client, Some(&name.namespace)), config);
    let mut store: Store<Secret> = Store::default();
    let mut log = FailureLog::new(format!("watching Secret {name}"));
    let name = name.clone();
    let event = move |event| {
        let event = match event {
            Ok(event) => store.apply(event, Some).then(|| {
                log.succeeded();
                let known = store.known().and_then(|known| known.values().next());
                Ok(known.cloned())
            }),
            Err(error) => {
                let why = chain(&error);
                log.failed(why.clone()).then_some(Err(why))
            }
        };
        std::future::ready(event.map(|event| (name.clone(), event)))
    };
    watch.into_stream().filter_map(event)
}

impl NamedSecrets {
    /// Reads the changed Secrets and returns their number.
    fn read_changed(
        &self,
        named: &BTreeMap<SecretName, Naming>,
        slots: &mut BTreeMap<SecretName, Slot>,
    ) -> usize {
        slots.retain(|name, _| named.contains_key(name));
        let mut read = 0;
        for (name, naming) in named {
            let slot = slots.entry(name.clone()).or_default();
            if slot.reading.as_ref().is_some_and(|it| it.naming == *naming) {
                continue;
            }
            read += 1;
            let (finding, source) = self.read(name, naming, slot);
            slot.reading = Some(Reading {
                naming: naming.clone(),
                finding,
                source: source.map(Arc::new),
            });
        }
        read
    }

    /// Returns the finding for a Secret, and its member.
    fn read(
        &self,
        name: &SecretName,
        naming: &Naming,
        slot: &Slot,
    ) -> (Option<Finding>, Option<Source>) {
        if slot.secret.is_none() && slot.trouble.is_none() {
            let source = pending(name, format!("looking for Secret {name}"));
            return (None, naming.trusted.then_some(source));
        }
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
                message: format!("{object} cannot be read now; using its last state: {why}"),
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

#[cfg(test)]
mod tests;

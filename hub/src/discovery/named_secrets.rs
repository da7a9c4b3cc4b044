//! Kubeconfig Secrets that KryptonDeployments reference by name. Each has its own watch by name, so the hub
//! reads no other Secret.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use futures::future::BoxFuture;
use futures::stream::{BoxStream, SelectAll};
use futures::{FutureExt as _, Stream, StreamExt as _};
use k8s_openapi::api::core::v1::Secret;
use krypton_runtime::newest::{Newest as _, NewestSeen as _, SendIfChanged as _};
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
use super::provider::{self, BATCH, ProviderState, by_origin, secrets};
use super::{Origin, Provider, ProviderHandle, Source, SourceKind, Unresolved};

/// A Secret on the home cluster.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SecretName {
    pub namespace: String,
    pub name: String,
}

impl SecretName {
    /// Returns `None` for other objects than Secrets.
    fn from_origin(origin: &Origin) -> Option<Self> {
        let namespace = origin.namespace.clone();
        Some(Self {
            namespace: namespace.filter(|_| origin.kind == SourceKind::Secret)?,
            name: origin.name.clone(),
        })
    }

    pub fn origin(&self) -> Origin {
        Origin {
            kind: SourceKind::Secret,
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
pub struct SecretReference {
    /// The key of the kubeconfig, instead of the default key.
    pub key: Option<String>,
    /// Whether a user with the right to do so references it. Otherwise it is a member only if it is open to
    /// all.
    pub trusted: bool,
}

/// All referenced Secrets; `None` until they are known.
pub type SecretReferences = Option<Arc<BTreeMap<SecretName, SecretReference>>>;

/// The state of a referenced Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SecretState {
    Present {
        /// The requested member name.
        member: String,
        /// Whether every user who may reference any Secret may reference this one.
        open: bool,
    },
    Absent,
    /// Not read yet, with the cause.
    Unread(String),
}

/// The states of all referenced Secrets that were read.
pub type SecretStates = Arc<BTreeMap<SecretName, SecretState>>;

/// Provider of the referenced Secrets.
pub(crate) struct NamedSecrets {
    pub client: Client,
    pub references: watch::Receiver<SecretReferences>,
    pub states: watch::Sender<SecretStates>,
    /// Discovery label. A member with it is open to all namespaces that its EdgeCluster allows.
    pub label: String,
    /// Key of the kubeconfig, unless an annotation or the reference names another.
    pub key: String,
    /// Prefix of the names of members from Secrets.
    pub prefix: String,
    pub policy: Policy,
}

/// The last read Secret, and why it may be outdated.
#[derive(Debug, Default)]
struct SecretEntry {
    /// `None` until the first read.
    secret: Option<Option<Secret>>,
    trouble: Option<String>,
    /// The parsed Secret. `None` after a change of the other fields.
    parsed: Option<ParsedSecret>,
}

/// A parsed Secret, as this reference requires.
#[derive(Debug)]
struct ParsedSecret {
    reference: SecretReference,
    state: Option<SecretState>,
    source: Option<Arc<Source>>,
}

impl Provider for NamedSecrets {
    fn describe(&self) -> String {
        "Secrets that KryptonDeployments name".to_owned()
    }

    fn covers(&self, origin: &Origin) -> bool {
        let references = self.references.get();
        SecretName::from_origin(origin)
            .is_some_and(|name| references.is_none_or(|references| references.contains_key(&name)))
    }

    /// Creating or deleting a KryptonDeployment does not request the member again while the Secret has its label.
    fn finds_unreferenced(&self) -> bool {
        false
    }

    fn follow(self: Arc<Self>, handle: ProviderHandle) -> BoxFuture<'static, ()> {
        let mut references = self.references.clone();
        // The first names count as a change.
        references.mark_changed();
        let watches = SecretWatches {
            provider: self,
            references,
            watches: SelectAll::new(),
            watched: BTreeMap::new(),
            entries: BTreeMap::new(),
        };
        provider::run(watches, handle).boxed()
    }
}

type SecretEvent = (SecretName, Result<Option<Secret>, String>);

/// A watch of each referenced Secret.
struct SecretWatches {
    provider: Arc<NamedSecrets>,
    references: watch::Receiver<SecretReferences>,
    watches: SelectAll<BoxStream<'static, SecretEvent>>,
    /// Each guard ends its watch when it is dropped.
    watched: BTreeMap<SecretName, DropGuard>,
    entries: BTreeMap<SecretName, SecretEntry>,
}

impl SecretWatches {
    /// Starts and ends watches by the referenced names.
    fn follow(&mut self, references: &BTreeMap<SecretName, SecretReference>) {
        self.watched.retain(|name, _| references.contains_key(name));
        for name in references.keys() {
            if !self.watched.contains_key(name) {
                let stop = CancellationToken::new();
                let watch = watch_secret(&self.provider.client, name);
                let watch = watch.take_until(stop.clone().cancelled_owned());
                self.watches.push(watch.boxed());
                self.watched.insert(name.clone(), stop.drop_guard());
            }
        }
    }
}

impl ProviderState for SecretWatches {
    async fn changed(&mut self) -> bool {
        tokio::select! {
            result = self.references.changed() => {
                if let Some(references) = self.references.get_and_update() {
                    self.follow(&references);
                }
                result.is_ok()
            }
            Some((name, event)) = self.watches.next(), if !self.watches.is_empty() => {
                self.entries.entry(name).or_default().apply(event);
                for _ in 0..BATCH {
                    let Some(Some((name, event))) = self.watches.next().now_or_never() else {
                        break;
                    };
                    self.entries.entry(name).or_default().apply(event);
                }
                true
            }
        }
    }

    async fn reread(&mut self, origin: &Origin) {
        if let Some(name) = SecretName::from_origin(origin)
            && self.watched.contains_key(&name)
            && let Some(secret) =
                kubeconfig_secret::reread(&self.provider.client, origin, &name.name).await
        {
            let entry = self.entries.entry(name).or_default();
            (entry.secret, entry.parsed) = (Some(Some(secret)), None);
        }
    }

    fn sources(&mut self) -> Option<BTreeMap<Origin, Arc<Source>>> {
        let references = self.references.get()?;
        self.provider.read_changed(&references, &mut self.entries);
        let sources = self.entries.values().filter_map(|it| it.parsed.as_ref());
        Some(by_origin(sources.filter_map(|it| it.source.as_ref())))
    }

    fn trouble(&self) -> Option<String> {
        None
    }

    /// A reader of these states looks up the member next, so the member comes first.
    fn published(&mut self) {
        let state = |(name, entry): (&SecretName, &SecretEntry)| {
            let state = entry.parsed.as_ref()?.state.clone()?;
            Some((name.clone(), state))
        };
        let states = self.entries.iter().filter_map(state).collect();
        self.provider.states.send_if_changed(Arc::new(states));
    }
}

impl SecretEntry {
    fn apply(&mut self, event: Result<Option<Secret>, String>) {
        self.parsed = None;
        match event {
            Ok(secret) => (self.secret, self.trouble) = (Some(secret), None),
            Err(problem) => self.trouble = Some(problem),
        }
    }
}

/// Watches one Secret.
fn watch_secret(client: &Client, name: &SecretName) -> impl Stream<Item = SecretEvent> + use<> {
    let config = Config::default().fields(&format!("metadata.name={}", name.name));
    let watch = Watch::objects(secrets(client, Some(&name.namespace)), config);
    let mut store: Store<Secret> = Store::default();
    let mut log = FailureLog::new(format!("watching Secret {name}"));
    let name = name.clone();
    let handle_event = move |event| {
        let event = match event {
            Ok(event) => store.apply(event, Some).then(|| {
                log.succeeded();
                let known = store.known().and_then(|known| known.values().next());
                Ok(known.cloned())
            }),
            Err(error) => {
                let problem = chain(&error);
                log.failed(problem.clone()).then_some(Err(problem))
            }
        };
        std::future::ready(event.map(|event| (name.clone(), event)))
    };
    watch.into_stream().filter_map(handle_event)
}

impl NamedSecrets {
    /// Reads the changed Secrets and returns their number.
    fn read_changed(
        &self,
        references: &BTreeMap<SecretName, SecretReference>,
        entries: &mut BTreeMap<SecretName, SecretEntry>,
    ) -> usize {
        entries.retain(|name, _| references.contains_key(name));
        let mut read = 0;
        for (name, reference) in references {
            let entry = entries.entry(name.clone()).or_default();
            if entry
                .parsed
                .as_ref()
                .is_some_and(|it| it.reference == *reference)
            {
                continue;
            }
            read += 1;
            let (state, source) = self.read(name, reference, entry);
            entry.parsed = Some(ParsedSecret {
                reference: reference.clone(),
                state,
                source: source.map(Arc::new),
            });
        }
        read
    }

    /// Returns the state of a Secret, and its source.
    fn read(
        &self,
        name: &SecretName,
        reference: &SecretReference,
        entry: &SecretEntry,
    ) -> (Option<SecretState>, Option<Source>) {
        if entry.secret.is_none() && entry.trouble.is_none() {
            let source = unread(name, format!("looking for Secret {name}"));
            return (None, reference.trusted.then_some(source));
        }
        let Some(secret) = &entry.secret else {
            let problem = entry.trouble.clone().unwrap_or_default();
            let source = unread(name, format!("Secret {name} cannot be read: {problem}"));
            return (
                Some(SecretState::Unread(problem)),
                reference.trusted.then_some(source),
            );
        };
        let existing = secret
            .as_ref()
            .filter(|secret| secret.metadata.deletion_timestamp.is_none());
        let Some(secret) = existing else {
            return (Some(SecretState::Absent), None);
        };
        let source = self.source(reference, secret, entry.trouble.as_deref());
        let labelled = |label: &str| secret.labels().get(label).map(String::as_str) == Some("true");
        let open = labelled(&self.label) || labelled(names::OPEN_TO_DEPLOYMENTS_LABEL);
        let state = SecretState::Present {
            member: source.requested_name(&self.prefix),
            open,
        };
        (Some(state), (reference.trusted || open).then_some(source))
    }

    fn source(
        &self,
        reference: &SecretReference,
        secret: &Secret,
        trouble: Option<&str>,
    ) -> Source {
        let annotated = || secret.annotations().get(names::KUBECONFIG_KEY_ANNOTATION);
        let key = reference.key.as_ref().or_else(annotated);
        let key = key.unwrap_or(&self.key);
        let missing = ": put the cluster's kubeconfig there, or name another key with spec.region.kubeconfig.secret.key of the KryptonDeployment";
        let source = Source::from_object(SourceKind::Secret, &secret.metadata);
        let object = source.origin.to_string();
        Source {
            access: kubeconfig_secret::kubeconfig(secret, &object, key, missing, &self.policy),
            stale: trouble.map(|problem| Unresolved {
                reason: reason::SOURCE_UNAVAILABLE,
                message: format!("{object} cannot be read now; using its last state: {problem}"),
            }),
            ..source
        }
    }
}

/// A source without access yet. The next read shows whether it exists.
fn unread(name: &SecretName, message: String) -> Source {
    Source::unread(name.origin(), name.name.clone(), message)
}

#[cfg(test)]
mod tests;

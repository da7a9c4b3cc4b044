//! Discovers members from an object that represents a cluster and a Secret with its kubeconfig. Cluster API
//! and Kamaji share this pattern. The hub runs two watches and reads each pair with a pure function.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use krypton_runtime::watch::store::Key;
use krypton_types::conditions::reason;
use krypton_types::kubeconfig::Policy;
use krypton_types::names;
use kube::api::DynamicObject;
use kube::runtime::watcher::Config;
use kube::{Client, ResourceExt as _};

use super::kubeconfig_secret;
use super::provider::{self, ApiKind, Discovery, Listed, by_origin};
use super::{Finds, Kind, Origin, Provider, Source, Unresolved};

/// The specifics of one kind of object. Pure.
pub trait Pairing: Send + Sync + 'static {
    fn kind(&self) -> Kind;

    /// The API of the objects.
    fn api(&self) -> ApiKind;

    /// The label and field selectors of the Secrets.
    fn secrets(&self) -> Config;

    /// Whether a selected Secret can be one of a pair. All other Secrets are dropped.
    fn keeps(&self, secret: &Secret) -> bool;

    /// Reads the relevant fields of an object.
    fn read(&self, object: &DynamicObject) -> Subject;

    /// Returns why the Secret suspends writes to the cluster, if it does.
    fn suspended_by(&self, _secret: &Secret) -> Option<String> {
        None
    }
}

/// The relevant fields of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Subject {
    /// Its Secret, in the same namespace; `None` if the object doesn't reference one yet.
    pub secret: Option<String>,
    /// The key of the kubeconfig in the Secret.
    pub key: String,
    /// The condition to wait for before the cluster is used for the first time. A cluster that was in use
    /// stays so, even if its status changes back.
    pub waiting: Option<String>,
    pub suspended: Option<String>,
}

/// The relevant fields of an object, with the common metadata.
#[derive(Clone, Debug, PartialEq)]
pub struct Object {
    pub uid: String,
    pub since: Option<Timestamp>,
    pub member: String,
    pub subject: Subject,
}

impl Object {
    pub(crate) fn of(object: &DynamicObject, pairing: &impl Pairing) -> Self {
        let renamed = object.annotations().get(names::MEMBER_NAME_ANNOTATION);
        Self {
            uid: object.uid().unwrap_or_default(),
            since: object.metadata.creation_timestamp.as_ref().map(|at| at.0),
            member: renamed.cloned().unwrap_or_else(|| object.name_any()),
            subject: pairing.read(object),
        }
    }
}

/// The last read pair.
#[derive(Debug)]
struct Pair {
    object: Object,
    /// resourceVersion of the Secret; `None` without a Secret.
    version: Option<String>,
    source: Arc<Source>,
}

/// Provider of the objects of one namespace, or of all, each with its Secret.
pub struct Paired<P> {
    pub client: Client,
    /// `None` means all namespaces.
    pub namespace: Option<String>,
    pub policy: Policy,
    pub pairing: P,
}

impl<P: Pairing> std::fmt::Debug for Paired<P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.describe())
    }
}

impl<P: Pairing> Provider for Paired<P> {
    fn describe(&self) -> String {
        let ApiKind { plural, group, .. } = self.pairing.api();
        let namespace = self.namespace.as_deref().unwrap_or("*");
        format!("{plural}.{group} {namespace}/*")
    }

    fn covers(&self, origin: &Origin) -> bool {
        origin.is_in(self.pairing.kind(), self.namespace.as_ref())
    }

    fn follow(self: Arc<Self>, finds: Finds) -> BoxFuture<'static, ()> {
        let (client, namespace) = (&self.client, self.namespace.as_deref());
        let provider = Arc::clone(&self);
        let read = move |object| Some(Object::of(&object, &provider.pairing));
        let objects = Listed::objects(client, namespace, self.pairing.api(), read);
        let provider = Arc::clone(&self);
        let keep = move |mut secret: Secret| {
            secret.metadata.managed_fields = None;
            provider.pairing.keeps(&secret).then_some(secret)
        };
        let secrets = Listed::secrets(client, namespace, self.pairing.secrets(), keep);
        let pairs = Pairs {
            provider: self,
            objects,
            secrets,
            pairs: BTreeMap::new(),
        };
        provider::run(pairs, finds).boxed()
    }
}

/// Both lists, and the pairs that were read from them.
struct Pairs<P> {
    provider: Arc<Paired<P>>,
    objects: Listed<DynamicObject, Object>,
    secrets: Listed<Secret, Secret>,
    pairs: BTreeMap<Key, Pair>,
}

impl<P: Pairing> Discovery for Pairs<P> {
    async fn changed(&mut self) -> bool {
        tokio::select! {
            () = self.objects.changed() => true,
            () = self.secrets.changed() => true,
        }
    }

    async fn reread(&mut self, origin: &Origin) {
        let namespace = origin.namespace.clone().unwrap_or_default();
        let pair = self.pairs.get(&(namespace, origin.name.clone()));
        let secret = pair.and_then(|pair| pair.object.subject.secret.as_deref());
        if let Some(name) = secret
            && let Some(secret) =
                kubeconfig_secret::again(&self.provider.client, origin, name).await
        {
            self.secrets.put(secret);
        }
    }

    fn sources(&mut self) -> Option<BTreeMap<Origin, Arc<Source>>> {
        let (objects, secrets) = (self.objects.known()?, self.secrets.known()?);
        let (pairing, policy) = (&self.provider.pairing, &self.provider.policy);
        self.pairs = pair(pairing, policy, objects, secrets, &self.pairs);
        Some(by_origin(self.pairs.values().map(|pair| &pair.source)))
    }

    fn trouble(&self) -> Option<String> {
        self.objects.trouble().or_else(|| self.secrets.trouble())
    }
}

/// Reads all pairs. Unchanged pairs keep their source.
fn pair(
    pairing: &impl Pairing,
    policy: &Policy,
    objects: &BTreeMap<Key, Object>,
    secrets: &BTreeMap<Key, Secret>,
    before: &BTreeMap<Key, Pair>,
) -> BTreeMap<Key, Pair> {
    let pairs = objects.iter().map(|(key, object)| {
        let mut object = object.clone();
        let before = before
            .get(key)
            .filter(|before| before.object.uid == object.uid);
        if before.is_some_and(|before| before.object.subject.waiting.is_none()) {
            object.subject.waiting = None;
        }
        let name = object.subject.secret.clone();
        let secret = name.and_then(|name| secrets.get(&(key.0.clone(), name)));
        let version = secret.map(|secret| secret.resource_version().unwrap_or_default());
        let same = before.filter(|before| before.object == object && before.version == version);
        let source = match same {
            Some(before) => Arc::clone(&before.source),
            None => Arc::new(read(pairing, policy, key, &object, secret)),
        };
        let pair = Pair {
            object,
            version,
            source,
        };
        (key.clone(), pair)
    });
    pairs.collect()
}

fn read(
    pairing: &impl Pairing,
    policy: &Policy,
    (namespace, name): &Key,
    object: &Object,
    secret: Option<&Secret>,
) -> Source {
    let origin = Origin {
        kind: pairing.kind(),
        namespace: Some(namespace.clone()),
        name: name.clone(),
    };
    let subject = &object.subject;
    let waiting = |message| Unresolved {
        reason: reason::SOURCE_NOT_READY,
        message,
    };
    let access = match (&subject.waiting, &subject.secret, secret) {
        (Some(what), _, _) => Err(waiting(format!("{origin} is not ready yet: {what}"))),
        (None, None, _) => Err(waiting(format!("{origin} names no Secret yet"))),
        (None, Some(secret), None) => Err(waiting(format!(
            "Secret {namespace}/{secret} of {origin} does not exist yet, or is not marked as a kubeconfig of a cluster"
        ))),
        (None, Some(name), Some(secret)) => {
            let object = format!("Secret {namespace}/{name} of {origin}");
            let missing = ", which must contain the kubeconfig";
            kubeconfig_secret::kubeconfig(secret, &object, &subject.key, missing, policy)
        }
    };
    let by_secret = || secret.and_then(|secret| pairing.suspended_by(secret));
    let why = subject.suspended.clone().or_else(by_secret);
    Source {
        uid: object.uid.clone(),
        member: object.member.clone(),
        since: object.since,
        access,
        suspended: why
            .map(|why| format!("{origin} {why}; nothing is written to its cluster until then")),
        origin,
        stale: None,
    }
}

#[cfg(test)]
pub(super) mod tests;

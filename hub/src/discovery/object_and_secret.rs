//! Discovers members from an object that represents a cluster and a Secret with its kubeconfig. Cluster API
//! and Kamaji share this pattern. The hub runs two watches and reads each pair with a pure function.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Secret;
use krypton_runtime::watch::store::Key;
use krypton_types::conditions::reason;
use krypton_types::kubeconfig::Policy;
use kube::api::DynamicObject;
use kube::runtime::watcher::Config;
use kube::{Client, ResourceExt as _};

use super::kubeconfig_secret;
use super::provider::{self, ApiKind, ProviderState, WatchedObjects, by_origin};
use super::{Origin, Provider, ProviderHandle, Source, SourceKind, Unresolved};

/// The specifics of one kind of object. Pure.
pub trait Pairing: Send + Sync + 'static {
    fn kind(&self) -> SourceKind;

    /// The API of the objects.
    fn api(&self) -> ApiKind;

    /// The label and field selectors of the Secrets.
    fn secrets(&self) -> Config;

    /// Whether a selected Secret can be one of a pair. All other Secrets are dropped.
    fn may_pair(&self, secret: &Secret) -> bool;

    /// Reads the relevant fields of an object.
    fn read(&self, object: &DynamicObject) -> ClusterFields;

    /// Returns why the Secret suspends writes to the cluster, if it does.
    fn suspended_by(&self, _secret: &Secret) -> Option<String> {
        None
    }
}

/// The relevant fields of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterFields {
    /// Its Secret, in the same namespace; `None` if the object doesn't reference one yet.
    pub secret: Option<String>,
    /// The key of the kubeconfig in the Secret.
    pub key: String,
    /// The condition to wait for before the cluster is used for the first time. A cluster that was in use
    /// stays so, even if its status changes back.
    pub waiting: Option<String>,
    pub suspended: Option<String>,
}

/// The relevant fields of an object, and its source without access.
#[derive(Clone, Debug, PartialEq)]
pub struct ClusterObject {
    pub source: Source,
    pub fields: ClusterFields,
}

impl ClusterObject {
    pub(crate) fn new(object: &DynamicObject, pairing: &impl Pairing) -> Self {
        Self {
            source: Source::from_object(pairing.kind(), &object.metadata),
            fields: pairing.read(object),
        }
    }
}

/// The last read pair.
#[derive(Debug)]
struct Pair {
    object: ClusterObject,
    /// resourceVersion of the Secret; `None` without a Secret.
    version: Option<String>,
    source: Arc<Source>,
}

/// Provider of the objects of one namespace, or of all, each with its Secret.
pub(crate) struct PairedClusters<P> {
    pub client: Client,
    /// `None` means all namespaces.
    pub namespace: Option<String>,
    pub policy: Policy,
    pub pairing: P,
}

impl<P: Pairing> Provider for PairedClusters<P> {
    fn describe(&self) -> String {
        let ApiKind { plural, group, .. } = self.pairing.api();
        let namespace = self.namespace.as_deref().unwrap_or("*");
        format!("{plural}.{group} {namespace}/*")
    }

    fn covers(&self, origin: &Origin) -> bool {
        origin.is_in(self.pairing.kind(), self.namespace.as_ref())
    }

    fn follow(self: Arc<Self>, handle: ProviderHandle) -> BoxFuture<'static, ()> {
        let (client, namespace) = (&self.client, self.namespace.as_deref());
        let provider = Arc::clone(&self);
        let read = move |object| Some(ClusterObject::new(&object, &provider.pairing));
        let objects = WatchedObjects::objects(client, namespace, self.pairing.api(), read);
        let provider = Arc::clone(&self);
        let read = move |mut secret: Secret| {
            secret.metadata.managed_fields = None;
            provider.pairing.may_pair(&secret).then_some(secret)
        };
        let secrets = WatchedObjects::secrets(client, namespace, self.pairing.secrets(), read);
        let pairs = PairList {
            provider: self,
            objects,
            secrets,
            pairs: BTreeMap::new(),
        };
        provider::run(pairs, handle).boxed()
    }
}

/// Both lists, and the pairs that were read from them.
struct PairList<P> {
    provider: Arc<PairedClusters<P>>,
    objects: WatchedObjects<DynamicObject, ClusterObject>,
    secrets: WatchedObjects<Secret, Secret>,
    pairs: BTreeMap<Key, Pair>,
}

impl<P: Pairing> ProviderState for PairList<P> {
    async fn changed(&mut self) -> bool {
        tokio::select! {
            () = self.objects.changed() => true,
            () = self.secrets.changed() => true,
        }
    }

    async fn reread(&mut self, origin: &Origin) {
        let namespace = origin.namespace.clone().unwrap_or_default();
        let pair = self.pairs.get(&(namespace, origin.name.clone()));
        let secret = pair.and_then(|pair| pair.object.fields.secret.as_deref());
        if let Some(name) = secret
            && let Some(secret) =
                kubeconfig_secret::reread(&self.provider.client, origin, name).await
        {
            self.secrets.store_object(secret);
        }
    }

    fn sources(&mut self) -> Option<BTreeMap<Origin, Arc<Source>>> {
        let (objects, secrets) = (self.objects.known()?, self.secrets.known()?);
        let (pairing, policy) = (&self.provider.pairing, &self.provider.policy);
        self.pairs = read_pairs(pairing, policy, objects, secrets, &self.pairs);
        Some(by_origin(self.pairs.values().map(|pair| &pair.source)))
    }

    fn trouble(&self) -> Option<String> {
        self.objects.trouble().or_else(|| self.secrets.trouble())
    }
}

/// Reads all pairs. Unchanged pairs keep their source.
fn read_pairs(
    pairing: &impl Pairing,
    policy: &Policy,
    objects: &BTreeMap<Key, ClusterObject>,
    secrets: &BTreeMap<Key, Secret>,
    previous: &BTreeMap<Key, Pair>,
) -> BTreeMap<Key, Pair> {
    let pairs = objects.iter().map(|(key, object)| {
        let mut object = object.clone();
        let previous = previous
            .get(key)
            .filter(|previous| previous.object.source.uid == object.source.uid);
        if previous.is_some_and(|previous| previous.object.fields.waiting.is_none()) {
            object.fields.waiting = None;
        }
        let name = object.fields.secret.clone();
        let secret = name.and_then(|name| secrets.get(&(key.0.clone(), name)));
        let version = secret.map(|secret| secret.resource_version().unwrap_or_default());
        let unchanged =
            previous.filter(|previous| previous.object == object && previous.version == version);
        let source = match unchanged {
            Some(previous) => Arc::clone(&previous.source),
            None => Arc::new(read_source(pairing, policy, &object, secret)),
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

fn read_source(
    pairing: &impl Pairing,
    policy: &Policy,
    object: &ClusterObject,
    secret: Option<&Secret>,
) -> Source {
    let ClusterObject { source, fields } = object;
    let origin = &source.origin;
    let namespace = origin.namespace.as_deref().unwrap_or_default();
    let waiting = |message| Unresolved::new(reason::SOURCE_NOT_READY, message);
    let access = match (&fields.waiting, &fields.secret, secret) {
        (Some(condition), _, _) => Err(waiting(format!("{origin} is not ready yet: {condition}"))),
        (None, None, _) => Err(waiting(format!("{origin} names no Secret yet"))),
        (None, Some(secret), None) => Err(waiting(format!(
            "Secret {namespace}/{secret} of {origin} does not exist yet, or is not marked as a kubeconfig of a cluster"
        ))),
        (None, Some(name), Some(secret)) => {
            let object = format!("Secret {namespace}/{name} of {origin}");
            let missing = ", which must contain the kubeconfig";
            kubeconfig_secret::kubeconfig(secret, &object, &fields.key, missing, policy)
        }
    };
    let by_secret = || secret.and_then(|secret| pairing.suspended_by(secret));
    let reason = fields.suspended.clone().or_else(by_secret);
    Source {
        access,
        suspended: reason.map(|reason| {
            format!("{origin} {reason}; Krypton writes nothing to its cluster until then")
        }),
        ..source.clone()
    }
}

#[cfg(test)]
pub(super) mod tests;

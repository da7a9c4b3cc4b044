//! Discovers members from an object that represents a cluster and a Secret with its kubeconfig. Cluster API
//! and Kamaji share this pattern. The hub runs two watches and reads each pair with a pure function.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt as _, StreamExt as _};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use krypton_types::conditions::reason;
use krypton_types::error_chain::chain;
use krypton_types::kubeconfig::Policy;
use krypton_types::names;
use kube::api::{Api, ApiResource, DynamicObject};
use kube::core::GroupVersionKind;
use kube::runtime::watcher::{self, Config, Event};
use kube::{Client, ResourceExt as _};

use super::listed::{self, Key, Listed, OBJECTS_MAX};
use super::{Finds, Kind, Origin, Provider, Source, Unresolved};
use crate::discovery::kubeconfig_secret;

const DEADLINE: Duration = Duration::from_secs(10);
/// Most events of one kind taken in before the sources are published. It splits a flood into batches.
const BATCH: usize = 512;

/// The specifics of one kind of object. Pure.
pub trait Pairing: Send + Sync + 'static {
    fn kind(&self) -> Kind;

    /// API group of the objects.
    fn group(&self) -> &'static str;

    /// The supported versions. The first version that the API server serves is used.
    fn versions(&self) -> &'static [&'static str];

    /// The plural resource name, as in API paths.
    fn plural(&self) -> &'static str;

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
        let (plural, group) = (self.pairing.plural(), self.pairing.group());
        let namespace = self.namespace.as_deref().unwrap_or("*");
        format!("{plural}.{group} {namespace}/*")
    }

    fn covers(&self, origin: &Origin) -> bool {
        origin.is_in(self.pairing.kind(), self.namespace.as_ref())
    }

    fn follow(self: Arc<Self>, finds: Finds) -> BoxFuture<'static, ()> {
        async move { self.run(&finds).await }.boxed()
    }
}

/// Why the objects cannot be watched.
#[derive(Debug, thiserror::Error)]
enum WatchError {
    #[error("finding out which versions of {group} are served failed; it is tried again")]
    Discovery {
        group: &'static str,
        #[source]
        source: kube::Error,
    },
    #[error(
        "finding out which versions of {group} are served: no answer in time; it is tried again"
    )]
    Slow { group: &'static str },
    #[error(
        "{plural} of {group} are not served, or in no version of {versions}; they are looked for again until their CRD is there"
    )]
    NotServed {
        group: &'static str,
        plural: &'static str,
        versions: String,
    },
    #[error("watching {0} failed; it is tried again")]
    Watch(&'static str, #[source] watcher::Error),
    #[error(transparent)]
    Other(#[from] watcher::Error),
}

/// Both lists, and why one of them may be outdated.
struct Lists {
    objects: Listed<Object>,
    secrets: Listed<Secret>,
    objects_trouble: Option<String>,
    secrets_trouble: Option<String>,
}

impl<P: Pairing> Paired<P> {
    async fn run(&self, finds: &Finds) {
        let mut objects = self.objects();
        let secrets = kubeconfig_secret::of(&self.client, self.namespace.as_deref());
        let mut secrets = listed::watch(secrets, self.pairing.secrets());
        let mut lists = Lists {
            objects: Listed::default(),
            secrets: Listed::default(),
            objects_trouble: None,
            secrets_trouble: None,
        };
        let mut pairs = BTreeMap::new();
        loop {
            let changed = tokio::select! {
                Some(event) = objects.next() => {
                    let mut changed = self.take_object(&mut lists, event);
                    for _ in 0..BATCH {
                        let Some(Some(event)) = objects.next().now_or_never() else { break };
                        changed |= self.take_object(&mut lists, event);
                    }
                    changed
                }
                Some(event) = secrets.next() => {
                    let mut changed = self.take_secret(&mut lists, event);
                    for _ in 0..BATCH {
                        let Some(Some(event)) = secrets.next().now_or_never() else { break };
                        changed |= self.take_secret(&mut lists, event);
                    }
                    changed
                }
                origin = finds.doubted() => match self.again(&pairs, &origin).await {
                    Some(secret) => self.take_secret(&mut lists, Ok(Event::Apply(secret))),
                    None => false,
                },
            };
            if !changed {
                continue;
            }
            for (left_out, what) in [
                (lists.objects.left_out(), self.pairing.plural()),
                (lists.secrets.left_out(), "Secrets"),
            ] {
                if left_out {
                    tracing::warn!(
                        provider = self.describe(),
                        "more than {OBJECTS_MAX} {what}: the others are left out"
                    );
                }
            }
            let trouble = lists.objects_trouble.as_ref();
            let trouble = trouble.or(lists.secrets_trouble.as_ref()).cloned();
            match (lists.objects.known(), lists.secrets.known(), trouble) {
                (Some(objects), Some(secrets), trouble) => {
                    pairs = pair(&self.pairing, &self.policy, objects, secrets, &pairs);
                    let by_origin = pairs
                        .values()
                        .map(|pair| (pair.source.origin.clone(), Arc::clone(&pair.source)));
                    finds.found_amid(trouble, by_origin.collect());
                }
                (_, _, Some(trouble)) => finds.trouble(trouble),
                // Publish nothing until both lists are complete.
                (_, _, None) => {}
            }
        }
    }

    /// Watches the objects in the best served version. It looks up the version at the start and after each
    /// failure.
    fn objects(&self) -> BoxStream<'static, Result<Event<DynamicObject>, WatchError>> {
        let (client, namespace) = (self.client.clone(), self.namespace.clone());
        let (group, plural) = (self.pairing.group(), self.pairing.plural());
        let versions = self.pairing.versions();
        listed::begun_anew(move || {
            let (client, namespace) = (client.clone(), namespace.clone());
            async move {
                let resource = served(&client, group, plural, versions).await?;
                let api: Api<DynamicObject> = match namespace {
                    Some(namespace) => Api::namespaced_with(client, &namespace, &resource),
                    None => Api::all_with(client, &resource),
                };
                Ok(listed::once(api, Config::default()))
            }
        })
    }

    fn take_object(
        &self,
        lists: &mut Lists,
        event: Result<Event<DynamicObject>, WatchError>,
    ) -> bool {
        let event = event.map_err(|error| match error {
            WatchError::Other(source) => WatchError::Watch(self.pairing.plural(), source),
            error => error,
        });
        let Some(event) = self.event(event, &mut lists.objects_trouble) else {
            return true;
        };
        let read = |object: DynamicObject| Some(Object::of(&object, &self.pairing));
        lists.objects.take(event, read)
    }

    fn take_secret(&self, lists: &mut Lists, event: watcher::Result<Event<Secret>>) -> bool {
        let event = event.map_err(|source| WatchError::Watch("Secrets", source));
        let Some(event) = self.event(event, &mut lists.secrets_trouble) else {
            return true;
        };
        let keep = |mut secret: Secret| {
            secret.metadata.managed_fields = None;
            self.pairing.keeps(&secret).then_some(secret)
        };
        lists.secrets.take(event, keep)
    }

    /// Records a failure and its end. Logs the same failure again at debug level only.
    fn event<K>(
        &self,
        event: Result<Event<K>, WatchError>,
        trouble: &mut Option<String>,
    ) -> Option<Event<K>> {
        match event {
            Ok(event) => {
                if !matches!(event, Event::Init | Event::InitApply(_)) {
                    *trouble = None;
                }
                Some(event)
            }
            Err(error) => {
                let why = chain(&error);
                if trouble.as_ref() == Some(&why) {
                    tracing::debug!(provider = self.describe(), problem = %why, "still so");
                } else {
                    tracing::warn!(provider = self.describe(), problem = %why, "members cannot be looked for");
                }
                *trouble = Some(why);
                None
            }
        }
    }

    /// Reads one Secret again, because the watch may lag.
    async fn again(&self, pairs: &BTreeMap<Key, Pair>, origin: &Origin) -> Option<Secret> {
        let namespace = origin.namespace.clone()?;
        let pair = pairs.get(&(namespace, origin.name.clone()))?;
        let name = pair.object.subject.secret.as_deref()?;
        kubeconfig_secret::again(&self.client, origin, name).await
    }
}

/// Returns the best served version.
async fn served(
    client: &Client,
    group: &'static str,
    plural: &'static str,
    versions: &'static [&'static str],
) -> Result<ApiResource, WatchError> {
    for version in versions {
        let group_version = format!("{group}/{version}");
        let listed = client.list_api_group_resources(&group_version);
        let listed = match tokio::time::timeout(DEADLINE, listed).await {
            Ok(Ok(listed)) => listed,
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => continue,
            Ok(Err(source)) => return Err(WatchError::Discovery { group, source }),
            Err(_) => return Err(WatchError::Slow { group }),
        };
        if let Some(found) = listed.resources.iter().find(|found| found.name == plural) {
            let kind = GroupVersionKind::gvk(group, version, &found.kind);
            return Ok(ApiResource::from_gvk_with_plural(&kind, plural));
        }
    }
    Err(WatchError::NotServed {
        group,
        plural,
        versions: versions.join(", "),
    })
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
            "Secret {namespace}/{secret} of {origin} is not there yet, or is not marked as one of a cluster's kubeconfig"
        ))),
        (None, Some(name), Some(secret)) => {
            let object = format!("Secret {namespace}/{name} of {origin}");
            let missing = ", which is where the kubeconfig is to be";
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
            .map(|why| format!("{origin} {why}; nothing is written to its cluster meanwhile")),
        origin,
        stale: None,
    }
}

#[cfg(test)]
pub(super) mod tests;

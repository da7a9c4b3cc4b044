//! The only reader of ConfigMaps and Secrets with values. Metadata watches trigger it, and it reads only
//! the requested objects.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{BoxStream, SelectAll};
use futures::{FutureExt, StreamExt};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use krypton_crds::edge_cluster::ValuesKind;
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::chance;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::NewestSeen as _;
use krypton_runtime::periodic::file::MAX_BYTES;
use krypton_runtime::retry::backoff;
use krypton_runtime::watch::Watch;
use krypton_types::error_chain::chain;
use kube::api::{Api, PostParams};
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{self, Config, Event};
use kube::{Client, ResourceExt};
use serde_json::{Map, Value};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::chart::values::{Place, Reading, Readings, word};
use crate::chart::values_file;

/// The Secret with the fleet's salt, in the hub's namespace.
pub const SALT_NAME: &str = "krypton-hub-values-salt";
const SALT_KEY: &str = "salt";
/// Prefixes of Krypton's own Secrets, which must never be used as values.
const OWN_NAMES: [&str; 3] = ["krypton-hub-", "krypton-join-", "krypton-agent-"];
const RETRY_MAX: Duration = Duration::from_secs(30);
/// Objects per page of a list.
const PAGE: u32 = 100;
/// Most events taken in before the next read.
const BATCH: usize = 256;
/// Most objects read before the result is published: each publication recomputes the values of all members.
const AT_ONCE: usize = 64;

/// The reader's input and output.
pub struct Follow {
    pub client: Client,
    /// Namespace of the hub on the home cluster.
    pub namespace: String,
    /// The requested places.
    pub wanted: watch::Receiver<BTreeSet<Place>>,
    pub readings: watch::Sender<Arc<Readings>>,
}

impl std::fmt::Debug for Follow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follow").finish_non_exhaustive()
    }
}

impl Readings {
    /// Records a failed read. An earlier reading of the place stays valid.
    fn unread(&mut self, place: &Place, error: &ApiError) {
        let unread = || Reading::Unread(format!("{place}: {}", chain(error)));
        self.by_place.entry(place.clone()).or_insert_with(unread);
    }
}

/// Kind and name of an object.
type Object = (ValuesKind, String);

/// A watch event.
enum Seen {
    Changed(Object),
    /// A complete list of one kind: objects that it doesn't contain are deleted.
    Listed(ValuesKind),
    Failed(ValuesKind, watcher::Error),
}

impl Follow {
    /// Reads and watches the requested places until `stop`. Opens no watch before the first request.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut watches: SelectAll<BoxStream<'static, Seen>> = SelectAll::new();
        let mut watched: BTreeSet<ValuesKind> = BTreeSet::new();
        let mut due: BTreeSet<Object> = BTreeSet::new();
        let mut held = Readings::default();
        // Objects that the home cluster doesn't allow the hub to read.
        let mut refused: BTreeSet<Object> = BTreeSet::new();
        let mut failures = 0;
        let (mut not_before, mut again) = (BootTime::default(), BootTime::default());
        loop {
            let wanted = self.wanted.see();
            for place in &wanted {
                if watched.insert(place.kind) {
                    watches.push(self.watch(place.kind));
                }
                if !held.by_place.contains_key(place) {
                    due.insert((place.kind, place.name.clone()));
                }
            }
            held.by_place.retain(|place, _| wanted.contains(place));
            let now = BootTime::now();
            if now >= again {
                due.append(&mut refused);
            }
            if now >= not_before && !due.is_empty() {
                let pause = backoff(failures + 1, RETRY_MAX, chance::random());
                match self.read(&wanted, &mut due, &mut refused, &mut held).await {
                    Ok(()) if refused.is_empty() => failures = 0,
                    Ok(()) if again <= now => {
                        failures += 1;
                        again = BootTime(now.0 + pause);
                    }
                    Ok(()) => {}
                    Err(error) => {
                        said(&error);
                        failures += 1;
                        not_before = BootTime(now.0 + pause);
                    }
                }
                self.publish(&held);
            }
            // Read the rest of a batch immediately.
            let retry = match (due.is_empty(), refused.is_empty()) {
                (false, _) => Some(not_before),
                (true, false) => Some(again),
                (true, true) => None,
            };
            tokio::select! {
                () = stop.cancelled() => return,
                changed = self.wanted.changed() => if changed.is_err() { return },
                () = clock::sleep_until(retry, BootTime::now()) => {}
                Some(seen) = watches.next(), if !watches.is_empty() => {
                    take(seen, &wanted, &mut due);
                    for _ in 0..BATCH {
                        let Some(Some(seen)) = watches.next().now_or_never() else { break };
                        take(seen, &wanted, &mut due);
                    }
                }
            }
        }
    }

    fn publish(&self, held: &Readings) {
        self.readings.send_if_modified(|before| {
            let changed = **before != *held;
            if changed {
                *before = Arc::new(held.clone());
            }
            changed
        });
    }

    /// Reads the due objects. A failed read keeps the previous value. If the API server doesn't respond,
    /// the remaining objects stay due.
    async fn read(
        &self,
        wanted: &BTreeSet<Place>,
        due: &mut BTreeSet<Object>,
        refused: &mut BTreeSet<Object>,
        held: &mut Readings,
    ) -> Result<(), ApiError> {
        let secrets = wanted.iter().any(|place| place.kind == ValuesKind::Secret);
        if secrets && held.salt.is_none() {
            match self.salt().await {
                Ok(salt) => held.salt = Some(salt),
                Err(error) => {
                    // Without the salt, Secrets are unusable.
                    for place in wanted.iter().filter(|it| it.kind == ValuesKind::Secret) {
                        held.unread(place, &error);
                    }
                    if error.status().is_none() {
                        return Err(error);
                    }
                    said(&error);
                    let kept = due.iter().filter(|it| it.0 == ValuesKind::Secret);
                    refused.extend(kept.cloned());
                    due.retain(|it| it.0 != ValuesKind::Secret);
                }
            }
        }
        for object in due.iter().take(AT_ONCE).cloned().collect::<Vec<_>>() {
            let places = wanted
                .iter()
                .filter(|place| place.kind == object.0 && place.name == object.1);
            let places: Vec<&Place> = places.collect();
            if places.is_empty() {
                due.remove(&object);
                continue;
            }
            match self.object(&object).await {
                Ok(found) => {
                    for place in places {
                        held.by_place
                            .insert(place.clone(), reading(place, found.as_ref()));
                    }
                    due.remove(&object);
                }
                Err(error) => {
                    for place in places {
                        held.unread(place, &error);
                    }
                    if error.status().is_none() {
                        return Err(error);
                    }
                    said(&error);
                    due.remove(&object);
                    refused.insert(object);
                }
            }
        }
        Ok(())
    }

    async fn object(&self, (kind, name): &Object) -> Result<Option<Content>, ApiError> {
        let attempt = format!("reading {} {}/{name}", word(*kind), self.namespace);
        match kind {
            ValuesKind::ConfigMap => {
                let api: Api<ConfigMap> = self.api();
                let found = call(attempt, api.get_opt(name)).await?;
                Ok(found.map(Content::of_config_map))
            }
            ValuesKind::Secret => {
                let api: Api<Secret> = self.api();
                let found = call(attempt, api.get_opt(name)).await?;
                Ok(found.map(Content::of_secret))
            }
        }
    }

    /// Returns the fleet's salt and creates it if missing. If two hubs create one, one of them succeeds.
    async fn salt(&self) -> Result<Arc<str>, ApiError> {
        let api: Api<Secret> = self.api();
        let attempt = |verb| format!("{verb} Secret {}/{SALT_NAME}", self.namespace);
        let found = call(attempt("reading"), api.get_opt(SALT_NAME)).await?;
        if let Some(salt) = found.as_ref().and_then(salt_in) {
            return Ok(salt);
        }
        let salt = format!(
            "{:032x}{:032x}",
            chance::secret::<u128>(),
            chance::secret::<u128>()
        );
        let data = [(SALT_KEY.to_owned(), ByteString(salt.clone().into_bytes()))];
        let data = Some(data.into());
        let params = PostParams::default();
        match found {
            // The Secret has no salt: the resourceVersion that was read is the precondition.
            Some(found) => {
                let next = Secret { data, ..found };
                let request = api.replace(SALT_NAME, &params, &next);
                call(attempt("updating"), request).await?;
            }
            None => {
                let metadata = ObjectMeta {
                    name: Some(SALT_NAME.to_owned()),
                    ..ObjectMeta::default()
                };
                let next = Secret {
                    metadata,
                    data,
                    ..Secret::default()
                };
                let request = api.create(&params, &next);
                call(attempt("creating"), request).await?;
            }
        }
        Ok(salt.into())
    }

    fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn watch(&self, kind: ValuesKind) -> BoxStream<'static, Seen> {
        let config = Config::default().page_size(PAGE);
        match kind {
            ValuesKind::ConfigMap => {
                let api = self.api::<PartialObjectMeta<ConfigMap>>();
                shown(kind, Watch::of(api, config))
            }
            ValuesKind::Secret => {
                let api = self.api::<PartialObjectMeta<Secret>>();
                shown(kind, Watch::of(api, config))
            }
        }
    }
}

fn said(error: &ApiError) {
    tracing::warn!(error = %chain(error), "reading values of the chart failed; retrying");
}

fn shown<K: Send + 'static>(
    kind: ValuesKind,
    watch: Watch<PartialObjectMeta<K>>,
) -> BoxStream<'static, Seen>
where
    PartialObjectMeta<K>: ResourceExt,
{
    let seen = move |event| match event {
        Ok(Event::Apply(meta) | Event::Delete(meta) | Event::InitApply(meta)) => {
            let meta: PartialObjectMeta<K> = meta;
            Some(Seen::Changed((kind, meta.name_any())))
        }
        Ok(Event::Init) => None,
        Ok(Event::InitDone) => Some(Seen::Listed(kind)),
        Err(error) => Some(Seen::Failed(kind, error)),
    };
    watch
        .into_stream()
        .filter_map(move |event| std::future::ready(seen(event)))
        .boxed()
}

fn take(seen: Seen, wanted: &BTreeSet<Place>, due: &mut BTreeSet<Object>) {
    match seen {
        Seen::Changed((kind, name)) => {
            let asked = |place: &Place| place.kind == kind && place.name == name;
            if wanted.iter().any(asked) {
                due.insert((kind, name));
            }
        }
        Seen::Listed(kind) => {
            let of_kind = wanted.iter().filter(|place| place.kind == kind);
            due.extend(of_kind.map(|place| (kind, place.name.clone())));
        }
        Seen::Failed(kind, error) => {
            tracing::warn!(error = %chain(&error), "watching {}s with values of the chart failed; retrying", word(kind));
        }
    }
}

/// The content of an object, and whether it may be used as values.
struct Content {
    data: BTreeMap<String, Vec<u8>>,
    /// Why it must not be used as values.
    refused: Option<String>,
}

impl Content {
    fn of_config_map(map: ConfigMap) -> Self {
        let texts = map.data.into_iter().flatten();
        let texts = texts.map(|(key, text)| (key, text.into_bytes()));
        let bytes = map.binary_data.into_iter().flatten();
        let bytes = bytes.map(|(key, bytes)| (key, bytes.0));
        Self {
            data: texts.chain(bytes).collect(),
            refused: None,
        }
    }

    fn of_secret(secret: Secret) -> Self {
        let name = secret.name_any();
        let type_ = secret.type_.as_deref().unwrap_or("Opaque");
        let refused = if OWN_NAMES.iter().any(|own| name.starts_with(own)) {
            Some("belongs to Krypton".to_owned())
        } else if type_ != "Opaque" {
            Some(format!("has type {type_} instead of Opaque"))
        } else {
            None
        };
        let data = secret.data.into_iter().flatten();
        Self {
            data: data.map(|(key, bytes)| (key, bytes.0)).collect(),
            refused,
        }
    }
}

fn salt_in(secret: &Secret) -> Option<Arc<str>> {
    let salt = &secret.data.as_ref()?.get(SALT_KEY)?.0;
    let salt = std::str::from_utf8(salt).ok()?;
    (salt.len() >= 32).then(|| salt.into())
}

/// Reads one place. A member's kubeconfig is never values: otherwise any user with write access to
/// EdgeClusters could read it.
fn reading(place: &Place, found: Option<&Content>) -> Reading {
    let (kind, name, key) = (word(place.kind), &place.name, &place.key);
    let Some(content) = found else {
        return Reading::Missing(format!("there is no {kind} {name} in the hub's namespace"));
    };
    if let Some(why) = &content.refused {
        return Reading::Invalid(format!(
            "{kind} {name} {why}, and is never values of the chart"
        ));
    }
    let Some(bytes) = content.data.get(key) else {
        return Reading::Missing(format!("{kind} {name} has no key {key}"));
    };
    if bytes.len() as u64 > MAX_BYTES {
        return Reading::Invalid(format!("{place}, is larger than 1 MiB"));
    }
    match values_file::mapping(bytes) {
        Ok(values) if is_kubeconfig(&values) => Reading::Invalid(format!(
            "{place}, is a kubeconfig, and is never values of the chart"
        )),
        Ok(values) => Reading::Values(Arc::new(values)),
        Err(error) => Reading::Invalid(format!("{place}, {error}")),
    }
}

fn is_kubeconfig(values: &Map<String, Value>) -> bool {
    values.contains_key("clusters") && values.contains_key("users")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(name: &str, type_: Option<&str>, key: &str, content: &str) -> Content {
        Content::of_secret(Secret {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                ..ObjectMeta::default()
            },
            type_: type_.map(str::to_owned),
            data: Some([(key.to_owned(), ByteString(content.as_bytes().to_vec()))].into()),
            ..Secret::default()
        })
    }

    fn place(kind: ValuesKind, name: &str) -> Place {
        Place {
            kind,
            name: name.to_owned(),
            key: "values.yaml".to_owned(),
        }
    }

    #[test]
    fn unusable_values_source_is_explained_without_revealing_content() {
        let of = |name: &str, type_, key: &str, content: &str| {
            let content = secret(name, type_, key, content);
            reading(&place(ValuesKind::Secret, name), Some(&content))
        };
        let Reading::Values(values) = of("a", None, "values.yaml", "a: {b: hunter2}") else {
            panic!("they are values");
        };
        assert_eq!(values["a"]["b"], "hunter2");
        assert!(matches!(
            of("a", Some("Opaque"), "values.yaml", ""),
            Reading::Values(values) if values.is_empty()
        ));
        let missing = of("a", None, "other.yaml", "a: 1");
        assert_eq!(
            missing,
            Reading::Missing("Secret a has no key values.yaml".to_owned())
        );
        let none = reading(&place(ValuesKind::ConfigMap, "a"), None);
        assert!(matches!(&none, Reading::Missing(what) if what.contains("no ConfigMap a")));
        let kubeconfig = "{apiVersion: v1, kind: Config, clusters: [], users: [{name: hunter2}]}";
        let large = format!("a: {}", "x".repeat(1024 * 1024));
        for (name, type_, content, why) in [
            ("a", None, "- hunter2", "line 1 holds a list"),
            ("a", None, "hunter2: [", "is not valid YAML"),
            ("a", None, kubeconfig, "kubeconfig"),
            ("a", None, large.as_str(), "1 MiB"),
            (
                "a",
                Some("kubernetes.io/tls"),
                "a: 1",
                "has type kubernetes.io/tls",
            ),
            ("krypton-hub-ca", None, "a: 1", "belongs to Krypton"),
        ] {
            match of(name, type_, "values.yaml", content) {
                Reading::Invalid(said) => {
                    assert!(said.contains(why) && said.contains(name), "{said}");
                    assert!(!said.contains("hunter2"), "{said}");
                }
                other => panic!("{why}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_config_map_holds_texts_and_bytes() {
        let map = ConfigMap {
            data: Some([("a".to_owned(), "x: 1".to_owned())].into()),
            binary_data: Some([("b".to_owned(), ByteString(b"x: 2".to_vec()))].into()),
            ..ConfigMap::default()
        };
        let content = Content::of_config_map(map);
        assert_eq!(content.data["a"], b"x: 1");
        assert_eq!(content.data["b"], b"x: 2");
    }

    #[test]
    fn short_salt_is_rejected() {
        let with = |salt: &str| Secret {
            data: Some([(SALT_KEY.to_owned(), ByteString(salt.as_bytes().to_vec()))].into()),
            ..Secret::default()
        };
        assert!(salt_in(&with("short")).is_none());
        assert!(salt_in(&Secret::default()).is_none());
        assert_eq!(&*salt_in(&with(&"s".repeat(64))).unwrap(), "s".repeat(64));
    }
}

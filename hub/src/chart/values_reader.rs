//! The only reader of ConfigMaps and Secrets with values. Metadata watches trigger it, and it reads only
//! the requested objects.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{BoxStream, SelectAll};
use futures::{FutureExt, StreamExt};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use krypton_crds::edge_cluster::ValuesKind;
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::chance;
use krypton_runtime::clock::{self, BootTime};
use krypton_runtime::newest::{NewestSeen as _, SendIfChanged as _};
use krypton_runtime::periodic::file::MAX_BYTES;
use krypton_runtime::retry::backoff;
use krypton_runtime::watch::Watch;
use krypton_types::error_chain::chain;
use kube::api::Api;
use kube::core::PartialObjectMeta;
use kube::runtime::watcher::{self, Config, Event};
use kube::{Client, ResourceExt};
use serde_json::{Map, Value};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::chart::values::{ValuesLocation, ValuesReading, ValuesReadings, kind_name};
use crate::chart::values_file;
use crate::leader::home_writer::create_or_replace;

/// The Secret with the fleet's salt, in the hub's namespace.
pub const SALT_NAME: &str = "krypton-hub-values-salt";
const SALT_KEY: &str = "salt";
/// Prefixes of Krypton's own Secrets, which must never be used as values.
const OWN_NAME_PREFIXES: [&str; 3] = ["krypton-hub-", "krypton-join-", "krypton-agent-"];
const RETRY_MAX: Duration = Duration::from_secs(30);
/// Objects per page of a list.
const PAGE: u32 = 100;
/// Most events taken in before the next read.
const BATCH: usize = 256;
/// Most objects read before the result is published: each publication recomputes the values of all members.
const PUBLISH_BATCH: usize = 64;

/// The reader's input and output.
pub(crate) struct ValuesReader {
    pub client: Client,
    /// Namespace of the hub on the home cluster.
    pub namespace: String,
    /// The requested locations.
    pub requested: watch::Receiver<BTreeSet<ValuesLocation>>,
    pub readings: watch::Sender<Arc<ValuesReadings>>,
}

impl ValuesReadings {
    /// Records a failed read. Earlier readings of the locations stay valid. Returns the error if the API server did not
    /// respond.
    fn record_failure<'a>(
        &mut self,
        locations: impl IntoIterator<Item = &'a ValuesLocation>,
        error: ApiError,
    ) -> Result<(), ApiError> {
        self.record_problem(locations, &chain(&error));
        if error.status().is_none() {
            return Err(error);
        }
        log_failure(&error);
        Ok(())
    }

    fn record_problem<'a>(
        &mut self,
        locations: impl IntoIterator<Item = &'a ValuesLocation>,
        problem: &str,
    ) {
        for location in locations {
            let unread = || ValuesReading::Unread(format!("{location}: {problem}"));
            self.by_location
                .entry(location.clone())
                .or_insert_with(unread);
        }
    }
}

/// Kind and name of an object.
type ObjectKey = (ValuesKind, String);

/// What a watch shows.
enum ValuesEvent {
    /// A list starts. It shows each object that exists.
    Listing(ValuesKind),
    /// The list is complete: objects that it doesn't contain are deleted.
    Listed(ValuesKind),
    Exists(ObjectKey),
    Deleted(ObjectKey),
}

/// The objects to read.
#[derive(Default)]
struct ReadQueue {
    due: BTreeSet<ObjectKey>,
    /// Objects that the home cluster doesn't allow the hub to read, or that are missing although a watch shows them.
    doubtful: BTreeSet<ObjectKey>,
    /// Requested objects that exist, as the watches show.
    existing: BTreeSet<ObjectKey>,
}

impl ReadQueue {
    fn record(&mut self, event: ValuesEvent, requested: &BTreeSet<ValuesLocation>) {
        let is_at = |location: &ValuesLocation, (kind, name): &ObjectKey| {
            location.kind == *kind && location.name == *name
        };
        let is_requested = |key| requested.iter().any(|location| is_at(location, key));
        match event {
            ValuesEvent::Listing(kind) => self.existing.retain(|(known, _)| *known != kind),
            ValuesEvent::Listed(kind) => {
                let listed = requested.iter().filter(|location| location.kind == kind);
                self.due
                    .extend(listed.map(|location| (kind, location.name.clone())));
            }
            ValuesEvent::Exists(key) if is_requested(&key) => {
                self.existing.insert(key.clone());
                self.due.insert(key);
            }
            ValuesEvent::Deleted(key) if is_requested(&key) => {
                self.existing.remove(&key);
                self.due.insert(key);
            }
            ValuesEvent::Exists(_) | ValuesEvent::Deleted(_) => {}
        }
    }
}

impl ValuesReader {
    /// Reads and watches the requested locations until `stop`. Opens no watch before the first request.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut watches: SelectAll<BoxStream<'static, ValuesEvent>> = SelectAll::new();
        let mut watched: BTreeSet<ValuesKind> = BTreeSet::new();
        let mut queue = ReadQueue::default();
        let mut readings = ValuesReadings::default();
        let mut failures = 0;
        let (mut not_before, mut retry_doubtful_at) = (BootTime::default(), BootTime::default());
        loop {
            let requested = self.requested.get_and_update();
            for location in &requested {
                if watched.insert(location.kind) {
                    watches.push(self.watch(location.kind));
                }
                if !readings.by_location.contains_key(location) {
                    queue.due.insert((location.kind, location.name.clone()));
                }
            }
            readings
                .by_location
                .retain(|location, _| requested.contains(location));
            let now = BootTime::now();
            if now >= retry_doubtful_at {
                queue.due.append(&mut queue.doubtful);
            }
            if now >= not_before && !queue.due.is_empty() {
                let pause = backoff(failures + 1, RETRY_MAX, chance::random());
                match self.read(&requested, &mut queue, &mut readings).await {
                    Ok(()) if queue.doubtful.is_empty() => failures = 0,
                    Ok(()) if retry_doubtful_at <= now => {
                        failures += 1;
                        retry_doubtful_at = now + pause;
                    }
                    Ok(()) => {}
                    Err(error) => {
                        log_failure(&error);
                        failures += 1;
                        not_before = now + pause;
                    }
                }
                self.readings.send_if_changed(Arc::new(readings.clone()));
            }
            // Read the rest of a batch immediately.
            let retry = match (queue.due.is_empty(), queue.doubtful.is_empty()) {
                (false, _) => Some(not_before),
                (true, false) => Some(retry_doubtful_at),
                (true, true) => None,
            };
            tokio::select! {
                () = stop.cancelled() => return,
                changed = self.requested.changed() => if changed.is_err() { return },
                () = clock::sleep_until(retry, BootTime::now()) => {}
                Some(event) = watches.next(), if !watches.is_empty() => {
                    queue.record(event, &requested);
                    for _ in 0..BATCH {
                        let Some(Some(event)) = watches.next().now_or_never() else { break };
                        queue.record(event, &requested);
                    }
                }
            }
        }
    }

    /// Reads the due objects. A failed read keeps the previous value. If the API server doesn't respond,
    /// the remaining objects stay due.
    async fn read(
        &self,
        requested: &BTreeSet<ValuesLocation>,
        queue: &mut ReadQueue,
        readings: &mut ValuesReadings,
    ) -> Result<(), ApiError> {
        let ReadQueue {
            due,
            doubtful,
            existing,
        } = queue;
        let needs_salt = requested
            .iter()
            .any(|location| location.kind == ValuesKind::Secret);
        if needs_salt && readings.salt.is_none() {
            match self.salt().await {
                Ok(salt) => readings.salt = Some(salt),
                Err(error) => {
                    // Without the salt, Secrets are unusable.
                    let secrets = requested.iter().filter(|it| it.kind == ValuesKind::Secret);
                    readings.record_failure(secrets, error)?;
                    let secrets_due = due.iter().filter(|it| it.0 == ValuesKind::Secret);
                    doubtful.extend(secrets_due.cloned());
                    due.retain(|it| it.0 != ValuesKind::Secret);
                }
            }
        }
        for object in due.iter().take(PUBLISH_BATCH).cloned().collect::<Vec<_>>() {
            let locations = requested
                .iter()
                .filter(|location| location.kind == object.0 && location.name == object.1);
            let locations: Vec<&ValuesLocation> = locations.collect();
            if locations.is_empty() {
                due.remove(&object);
                continue;
            }
            match self.fetch_object(&object).await {
                Ok(None) if existing.contains(&object) => {
                    let problem = "the API server does not return the object that it lists";
                    readings.record_problem(locations, problem);
                    due.remove(&object);
                    doubtful.insert(object);
                }
                Ok(content) => {
                    for location in locations {
                        readings
                            .by_location
                            .insert(location.clone(), reading(location, content.as_ref()));
                    }
                    due.remove(&object);
                }
                Err(error) => {
                    readings.record_failure(locations, error)?;
                    due.remove(&object);
                    doubtful.insert(object);
                }
            }
        }
        Ok(())
    }

    async fn fetch_object(
        &self,
        (kind, name): &ObjectKey,
    ) -> Result<Option<ObjectContent>, ApiError> {
        let attempt = format!("reading {} {}/{name}", kind_name(*kind), self.namespace);
        match kind {
            ValuesKind::ConfigMap => {
                let api: Api<ConfigMap> = self.api();
                let config_map = call(attempt, api.get_opt(name)).await?;
                Ok(config_map.map(ObjectContent::from_config_map))
            }
            ValuesKind::Secret => {
                let api: Api<Secret> = self.api();
                let secret = call(attempt, api.get_opt(name)).await?;
                Ok(secret.map(ObjectContent::from_secret))
            }
        }
    }

    /// Returns the fleet's salt and creates it if missing. If two hubs create one, one of them succeeds.
    async fn salt(&self) -> Result<Arc<str>, ApiError> {
        let api: Api<Secret> = self.api();
        let attempt = |verb| format!("{verb} Secret {}/{SALT_NAME}", self.namespace);
        let existing = call(attempt("reading"), api.get_opt(SALT_NAME)).await?;
        if let Some(salt) = existing.as_ref().and_then(read_salt) {
            return Ok(salt);
        }
        let salt = format!(
            "{:032x}{:032x}",
            chance::secret::<u128>(),
            chance::secret::<u128>()
        );
        let data = [(SALT_KEY.to_owned(), ByteString(salt.clone().into_bytes()))];
        let attempt = attempt(existing.as_ref().map_or("creating", |_| "updating"));
        let mut secret = existing.unwrap_or_default();
        secret.metadata.name = Some(SALT_NAME.to_owned());
        secret.data = Some(data.into());
        // If the Secret has no salt, the resourceVersion that was read is the precondition.
        call(attempt, create_or_replace(&api, &secret)).await?;
        Ok(salt.into())
    }

    fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn watch(&self, kind: ValuesKind) -> BoxStream<'static, ValuesEvent> {
        let config = Config::default().page_size(PAGE);
        match kind {
            ValuesKind::ConfigMap => {
                let api = self.api::<PartialObjectMeta<ConfigMap>>();
                watch_events(kind, Watch::objects(api, config))
            }
            ValuesKind::Secret => {
                let api = self.api::<PartialObjectMeta<Secret>>();
                watch_events(kind, Watch::objects(api, config))
            }
        }
    }
}

fn log_failure(error: &ApiError) {
    tracing::warn!(error = %chain(error), "reading values of the chart failed; retrying");
}

fn watch_events<K: Send + 'static>(
    kind: ValuesKind,
    watch: Watch<PartialObjectMeta<K>>,
) -> BoxStream<'static, ValuesEvent>
where
    PartialObjectMeta<K>: ResourceExt,
{
    let convert = move |event: watcher::Result<Event<PartialObjectMeta<K>>>| match event {
        Ok(Event::Apply(meta) | Event::InitApply(meta)) => {
            Some(ValuesEvent::Exists((kind, meta.name_any())))
        }
        Ok(Event::Delete(meta)) => Some(ValuesEvent::Deleted((kind, meta.name_any()))),
        Ok(Event::Init) => Some(ValuesEvent::Listing(kind)),
        Ok(Event::InitDone) => Some(ValuesEvent::Listed(kind)),
        Err(error) => {
            tracing::warn!(error = %chain(&error), kind = kind_name(kind), "failed to watch chart values; retrying");
            None
        }
    };
    watch
        .into_stream()
        .filter_map(move |event| std::future::ready(convert(event)))
        .boxed()
}

/// The content of an object, and whether it may be used as values.
struct ObjectContent {
    data: BTreeMap<String, Vec<u8>>,
    /// Why it must not be used as values.
    rejection: Option<String>,
}

impl ObjectContent {
    fn from_config_map(map: ConfigMap) -> Self {
        let texts = map.data.into_iter().flatten();
        let texts = texts.map(|(key, text)| (key, text.into_bytes()));
        let bytes = map.binary_data.into_iter().flatten();
        let bytes = bytes.map(|(key, bytes)| (key, bytes.0));
        Self {
            data: texts.chain(bytes).collect(),
            rejection: None,
        }
    }

    fn from_secret(secret: Secret) -> Self {
        let name = secret.name_any();
        let type_ = secret.type_.as_deref().unwrap_or("Opaque");
        let rejection = if OWN_NAME_PREFIXES
            .iter()
            .any(|prefix| name.starts_with(prefix))
        {
            Some("belongs to Krypton".to_owned())
        } else if type_ != "Opaque" {
            Some(format!("has type {type_} instead of Opaque"))
        } else {
            None
        };
        let data = secret.data.into_iter().flatten();
        Self {
            data: data.map(|(key, bytes)| (key, bytes.0)).collect(),
            rejection,
        }
    }
}

fn read_salt(secret: &Secret) -> Option<Arc<str>> {
    let salt = &secret.data.as_ref()?.get(SALT_KEY)?.0;
    let salt = std::str::from_utf8(salt).ok()?;
    (salt.len() >= 32).then(|| salt.into())
}

/// Reads one location. A member's kubeconfig is never values: otherwise any user with write access to
/// EdgeClusters could read it.
fn reading(location: &ValuesLocation, content: Option<&ObjectContent>) -> ValuesReading {
    let (kind, name, key) = (kind_name(location.kind), &location.name, &location.key);
    let Some(content) = content else {
        return ValuesReading::Missing(format!(
            "{kind} {name} does not exist in the hub's namespace"
        ));
    };
    if let Some(reason) = &content.rejection {
        return ValuesReading::Invalid(format!(
            "{kind} {name} {reason}, so it cannot contain chart values"
        ));
    }
    let Some(bytes) = content.data.get(key) else {
        return ValuesReading::Missing(format!("{kind} {name} has no key {key}"));
    };
    if bytes.len() as u64 > MAX_BYTES {
        return ValuesReading::Invalid(format!("{location}, is larger than 1 MiB"));
    }
    match values_file::mapping(bytes) {
        Ok(values) if is_kubeconfig(&values) => ValuesReading::Invalid(format!(
            "{location}, is a kubeconfig, so it cannot contain chart values"
        )),
        Ok(values) => ValuesReading::Values(Arc::new(values)),
        Err(error) => ValuesReading::Invalid(format!("{location}, {error}")),
    }
}

fn is_kubeconfig(values: &Map<String, Value>) -> bool {
    values.contains_key("clusters") && values.contains_key("users")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(name: &str, type_: Option<&str>, key: &str, content: &str) -> ObjectContent {
        let mut secret = Secret {
            type_: type_.map(str::to_owned),
            data: Some([(key.to_owned(), ByteString(content.as_bytes().to_vec()))].into()),
            ..Secret::default()
        };
        secret.metadata.name = Some(name.to_owned());
        ObjectContent::from_secret(secret)
    }

    fn location(kind: ValuesKind, name: &str) -> ValuesLocation {
        ValuesLocation {
            kind,
            name: name.to_owned(),
            key: "values.yaml".to_owned(),
        }
    }

    #[test]
    fn unusable_values_source_is_explained_without_revealing_content() {
        let read_secret = |name: &str, type_, key: &str, content: &str| {
            let content = secret(name, type_, key, content);
            reading(&location(ValuesKind::Secret, name), Some(&content))
        };
        let ValuesReading::Values(values) =
            read_secret("a", None, "values.yaml", "a: {b: hunter2}")
        else {
            panic!("they are values");
        };
        assert_eq!(values["a"]["b"], "hunter2");
        assert!(matches!(
            read_secret("a", Some("Opaque"), "values.yaml", ""),
            ValuesReading::Values(values) if values.is_empty()
        ));
        let missing = read_secret("a", None, "other.yaml", "a: 1");
        assert_eq!(
            missing,
            ValuesReading::Missing("Secret a has no key values.yaml".to_owned())
        );
        let none = reading(&location(ValuesKind::ConfigMap, "a"), None);
        assert!(
            matches!(&none, ValuesReading::Missing(what) if what.contains("ConfigMap a does not exist"))
        );
        let kubeconfig = "{apiVersion: v1, kind: Config, clusters: [], users: [{name: hunter2}]}";
        let large = format!("a: {}", "x".repeat(1024 * 1024));
        for (name, type_, content, reason) in [
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
            match read_secret(name, type_, "values.yaml", content) {
                ValuesReading::Invalid(error) => {
                    assert!(error.contains(reason) && error.contains(name), "{error}");
                    assert!(!error.contains("hunter2"), "{error}");
                }
                other => panic!("{reason}: {other:?}"),
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
        let content = ObjectContent::from_config_map(map);
        assert_eq!(content.data["a"], b"x: 1");
        assert_eq!(content.data["b"], b"x: 2");
    }

    #[test]
    fn short_salt_is_rejected() {
        let with = |salt: &str| Secret {
            data: Some([(SALT_KEY.to_owned(), ByteString(salt.as_bytes().to_vec()))].into()),
            ..Secret::default()
        };
        assert!(read_salt(&with("short")).is_none());
        assert!(read_salt(&Secret::default()).is_none());
        assert_eq!(&*read_salt(&with(&"s".repeat(64))).unwrap(), "s".repeat(64));
    }
}

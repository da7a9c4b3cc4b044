//! Reads the parts of a support bundle.

use std::net::SocketAddr;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_runtime::call::call_within;
use krypton_runtime::lease::LEASE_NAME;
use krypton_types::join_info;
use krypton_types::names::{CHART_CONFIG_MAP, EPOCH_CONFIG_MAP, HUB_LEASE, MEMBERS_CONFIG_MAP};
use krypton_types::redact::redact;
use kube::api::{DynamicObject, ListParams, LogParams};
use kube::core::ApiResource;
use kube::{Resource, ResourceExt as _};
use serde_json::{Map, Value, json};

use super::contents::BundleContents;
use super::redaction::redacted;
use crate::debug_port::DebugPort;
use crate::error::KubectlError;
use crate::home::Connection;
use crate::kind::Kind;
use crate::objects::{DEADLINE, Objects, Scope};
use crate::output::{OutputFormat, encode_list};
use crate::program::{Program, programs};
use crate::running_pods::ProgramPod;

/// Objects of one kind: enough for a diagnosis, also in a large fleet.
const MAX_OBJECTS: usize = 2_000;
/// The newest lines of one container's log, and the limits of a request.
const MAX_LOG_LINES: i64 = 20_000;
const MIN_LOG_LINES: i64 = 1_000;
const MAX_LOG_BYTES: i64 = 8 << 20;
/// Release Secrets, of which a bundle lists one page.
const MAX_RELEASES: u32 = 500;
/// For all requests.
const BUNDLE_DEADLINE: Duration = Duration::from_secs(300);
/// For all debug ports, which come last because the other parts matter more.
const DUMPS_DEADLINE: Duration = Duration::from_secs(60);
/// ConfigMaps of the hub. They contain nothing secret.
const CONFIG_MAPS: [&str; 4] = [
    join_info::NAME,
    CHART_CONFIG_MAP,
    EPOCH_CONFIG_MAP,
    MEMBERS_CONFIG_MAP,
];

/// The parts of a bundle that have been read so far.
pub(super) struct BundleReader<'a> {
    cluster: &'a Connection,
    contents: BundleContents,
    /// The first failure, in case nothing can be read.
    first_error: Option<KubectlError>,
    has_read: bool,
    processes: Vec<ProgramPod>,
}

impl<'a> BundleReader<'a> {
    pub(super) fn new(cluster: &'a Connection, now: Timestamp) -> Self {
        Self {
            cluster,
            contents: BundleContents::new(&cluster.context, now),
            first_error: None,
            has_read: false,
            processes: Vec::new(),
        }
    }

    /// Reads all parts.
    ///
    /// # Errors
    /// Fails only if no part can be read.
    pub(super) async fn read_all(
        mut self,
        namespaces: &[String],
        addresses: &[SocketAddr],
    ) -> Result<BundleContents, KubectlError> {
        let reading = self.read(namespaces, addresses);
        if tokio::time::timeout(BUNDLE_DEADLINE, reading)
            .await
            .is_err()
        {
            let reason = format!("reading took longer than {} s", BUNDLE_DEADLINE.as_secs());
            self.contents.add_missing("all later parts", &reason);
        }
        match self.first_error {
            Some(error) if !self.has_read => Err(error),
            _ => Ok(self.contents),
        }
    }

    async fn read(&mut self, namespaces: &[String], addresses: &[SocketAddr]) {
        self.read_versions().await;
        // First the parts that disappear first, and must have their room.
        let mut found_program = false;
        for namespace in namespaces {
            found_program |= self.read_namespace(namespace).await;
        }
        if !found_program {
            let names = namespaces.join(" or ");
            let reason = format!(
                "none in {names}: name a hub's namespace with --hub-namespace, and an agent's with --namespace"
            );
            self.contents
                .add_missing("pods and logs of hub or agent", &reason);
        }
        for (kind, file) in [
            (Kind::Cluster, "clusters.yaml"),
            (Kind::Tenant, "tenants.yaml"),
            (Kind::Deployment, "deployments.yaml"),
        ] {
            let objects = self.cluster.untyped(kind.resource(), &Scope::All);
            let values = self.list_redacted(&objects, "").await;
            self.add_yaml(file, values);
        }
        self.read_crds().await;
        self.read_events(namespaces).await;
        self.read_releases().await;
        let dumps = tokio::time::timeout(DUMPS_DEADLINE, self.read_dumps(addresses));
        if dumps.await.is_err() {
            let reason = format!(
                "the debug ports took longer than {} s",
                DUMPS_DEADLINE.as_secs()
            );
            self.contents
                .add_missing("the state of the other pods", &reason);
        }
    }

    async fn read_dumps(&mut self, addresses: &[SocketAddr]) {
        for address in addresses {
            for program in Program::ALL {
                self.read_dump(DebugPort::Address(*address), program, "debug")
                    .await;
            }
        }
        for process in std::mem::take(&mut self.processes) {
            let folder = format!("{}/debug", process.namespace);
            if !process.is_running {
                let file = format!("{folder}/{}.{}", process.name, process.program.dump_file());
                self.contents.add_missing(&file, "its pod does not run");
                continue;
            }
            let port = process.debug_port(self.cluster);
            self.read_dump(port, process.program, &folder).await;
        }
    }

    async fn read_versions(&mut self) {
        let reading = self.cluster.client.apiserver_version();
        let deadline = self.cluster.request_timeout.unwrap_or(DEADLINE);
        let apiserver = call_within(deadline, "reading the version", reading).await;
        let apiserver = apiserver.ok().map(|info| info.git_version);
        let versions =
            json!({"kubectl-krypton": env!("CARGO_PKG_VERSION"), "apiserver": apiserver});
        let text = format!("{versions:#}\n");
        self.contents.add("versions.json", text);
    }

    /// Reads the CRDs without their schemas.
    async fn read_crds(&mut self) {
        let file = "crds.yaml";
        let objects = self.objects_of::<CustomResourceDefinition>(&Scope::All);
        let names = Kind::ALL.map(|kind| {
            let kind = kind.resource();
            format!("{}.{}", kind.plural, kind.group)
        });
        let names = names.each_ref().map(String::as_str);
        let mut crds = self.read_named(&objects, &names, file).await;
        for version in crds
            .iter_mut()
            .flatten()
            .filter_map(|crd| crd.pointer_mut("/spec/versions")?.as_array_mut())
            .flatten()
            .filter_map(Value::as_object_mut)
        {
            version.remove("schema");
            version.remove("additionalPrinterColumns");
        }
        let redacted_crds = crds.map(|crds| crds.iter().map(redacted).collect());
        self.add_yaml(file, redacted_crds);
    }

    /// Reads the objects of a namespace that may contain hub or agent. Returns false if it contains neither.
    async fn read_namespace(&mut self, namespace: &str) -> bool {
        let scope = Scope::Namespace(namespace.to_owned());
        let file = format!("{namespace}/leases.yaml");
        let leases = self.objects_of::<Lease>(&scope);
        let leases = self
            .read_named(&leases, &[HUB_LEASE, LEASE_NAME], &file)
            .await;
        let leases = self.ok_or_note_missing(&file, leases);
        let has_lease = leases.as_ref().is_none_or(|leases| !leases.is_empty());
        if let Some(leases) = leases.filter(|leases| !leases.is_empty()) {
            self.add_yaml(&file, Ok(leases.iter().map(redacted).collect()));
        }
        let file = format!("{namespace}/configmaps.yaml");
        let maps = self.objects_of::<ConfigMap>(&scope);
        let maps = self.read_named(&maps, &CONFIG_MAPS, &file).await;
        if let Some(maps) = self
            .ok_or_note_missing(&file, maps)
            .filter(|maps| !maps.is_empty())
        {
            self.add_yaml(&file, Ok(maps.iter().map(config_map).collect()));
        }
        let file = format!("{namespace}/pods.yaml");
        let pods = self.objects_of::<Pod>(&scope);
        let pods = self.list_redacted(&pods, "").await;
        let Some(mut pods) = self.ok_or_note_missing(&file, pods) else {
            return true;
        };
        pods.retain(|pod| programs(pod).next().is_some());
        if pods.is_empty() {
            return has_lease;
        }
        let processes = pods.iter().flat_map(|pod| {
            programs(pod).map(move |program| ProgramPod::new(pod, program, namespace))
        });
        let processes: Vec<ProgramPod> = processes.collect();
        self.add_yaml(&file, Ok(pods));
        for process in &processes {
            for previous in [false, true] {
                self.read_log(process, previous).await;
            }
        }
        self.processes.extend(processes);
        true
    }

    /// Reads the state of a process. It contains no secrets, but is redacted too.
    async fn read_dump(&mut self, port: DebugPort<'_>, program: Program, folder: &str) {
        let file = format!("{folder}/{}.{}", port.name(), program.dump_file());
        let path = format!("/debug/{}", program.dump_file());
        let text = match port.send(&path, None).await {
            // Only the response of an address shows which program runs there.
            Err(KubectlError::Refused(_)) if matches!(port, DebugPort::Address(_)) => return,
            Err(error) => Err(error),
            Ok(text) => match serde_json::from_str::<Value>(&text) {
                Ok(dump) => Ok(format!("{:#}\n", redacted(&dump))),
                Err(error) => Err(port.no_response(&format!("its response is not JSON: {error}"))),
            },
        };
        self.add(&file, text);
    }

    /// Reads the newest lines, or fewer if they are long or slow: the API server would cut off the newest ones.
    async fn read_log(&mut self, process: &ProgramPod, previous: bool) {
        let (namespace, pod) = (&process.namespace, &process.name);
        let logs = self.cluster.namespaced::<Pod>(namespace).subresource("log");
        let extension = if previous { "previous.log" } else { "log" };
        let file = format!("{namespace}/logs/{pod}.{extension}");
        let mut lines = MAX_LOG_LINES;
        loop {
            let params = LogParams {
                container: Some(process.program.container().to_owned()),
                previous,
                tail_lines: Some(lines),
                limit_bytes: Some(MAX_LOG_BYTES),
                ..LogParams::default()
            };
            let is_cut =
                |log: &str| i64::try_from(log.len()).is_ok_and(|bytes| bytes >= MAX_LOG_BYTES);
            let is_last = lines <= MIN_LOG_LINES;
            match logs.call("get", "", logs.api.logs(pod, &params)).await {
                Ok(log) if !is_last && is_cut(&log) => {}
                // No container has terminated yet.
                Err(error) if previous && error.code() == Some(400) => return,
                Err(error) if !is_last && error.is_timeout() => {}
                log => {
                    if log.is_ok() && lines < MAX_LOG_LINES {
                        let reason = format!("only its last {lines} lines are in it");
                        self.contents.add_missing(&file, &reason);
                    }
                    self.add(&file, log.map(|log| redact(&log)));
                    return;
                }
            }
            lines /= 4;
        }
    }

    /// Reads all events of Krypton's kinds, and all events in the namespaces of hub and agent; the newest last.
    async fn read_events(&mut self, namespaces: &[String]) {
        let hub_namespaces = namespaces.iter().map(|namespace| {
            let scope = Scope::Namespace(namespace.clone());
            (scope, String::new(), format!("{namespace}/events.yaml"))
        });
        let krypton_kinds = Kind::ALL.map(|kind| {
            let kind = kind.resource().kind;
            let fields = format!("regarding.kind={kind}");
            (Scope::All, fields, format!("events-{kind}.yaml"))
        });
        for (scope, fields, file) in hub_namespaces.chain(krypton_kinds) {
            let events = self.objects_of::<Event>(&scope);
            let mut events = self.list_redacted(&events, &fields).await;
            if let Ok(events) = &mut events {
                events.sort_by_cached_key(|event| {
                    let time = |at| event.pointer(at).and_then(Value::as_str);
                    let last = time("/series/lastObservedTime").or_else(|| time("/eventTime"));
                    let last = last.or_else(|| time("/deprecatedLastTimestamp"));
                    last.unwrap_or_default().to_owned()
                });
            }
            self.add_yaml(&file, events);
        }
    }

    /// Reads names and labels of Helm's release Secrets, without their data.
    async fn read_releases(&mut self) {
        let secrets = self.cluster.all::<Secret>();
        let params = ListParams::default()
            .labels("owner=helm")
            .fields("type=helm.sh/release.v1")
            .limit(MAX_RELEASES);
        let file = "releases.yaml";
        let listing = secrets.api.list_metadata(&params);
        let list = secrets.call("list", "", listing).await;
        let more = list
            .as_ref()
            .ok()
            .and_then(|list| list.metadata.continue_.as_ref());
        if more.is_some_and(|token| !token.is_empty()) {
            let reason = format!("only the first {MAX_RELEASES} are in it");
            self.contents.add_missing(file, &reason);
        }
        let releases = list.map(|list| {
            let releases = list.items.iter().map(|secret| {
                json!({
                    "namespace": secret.namespace(),
                    "name": secret.name_any(),
                    "created": secret.creation_timestamp(),
                    "labels": secret.labels(),
                })
            });
            releases.collect()
        });
        self.add_yaml(file, releases);
    }

    fn objects_of<K: Resource<DynamicType = ()>>(&self, scope: &Scope) -> Objects<DynamicObject> {
        self.cluster.untyped(ApiResource::erase::<K>(&()), scope)
    }

    /// Lists redacted objects, up to a limit.
    async fn list_redacted(
        &mut self,
        objects: &Objects<DynamicObject>,
        fields: &str,
    ) -> Result<Vec<Value>, KubectlError> {
        let mut objects_read = Vec::new();
        // Redacts page by page, because values may be large.
        let on_page = |page: Vec<DynamicObject>| {
            objects_read.extend(page.into_iter().map(|it| redacted(&objects.to_value(it))));
            objects_read.len() < MAX_OBJECTS
        };
        let params = ListParams::default().fields(fields);
        if !objects.for_each_page(params, on_page).await? {
            let part = format!("more {}", objects.kind.plural);
            let reason = format!("only the first {} are in it", objects_read.len());
            self.contents.add_missing(&part, &reason);
        }
        Ok(objects_read)
    }

    /// Reads the existing objects among `names`. Notes failed ones as parts of `file`, unless all fail.
    async fn read_named(
        &mut self,
        objects: &Objects<DynamicObject>,
        names: &[&str],
        file: &str,
    ) -> Result<Vec<Value>, KubectlError> {
        let (mut values, mut failed) = (Vec::new(), Vec::new());
        for name in names {
            match objects.find(name).await {
                Ok(object) => values.extend(object.map(|it| objects.to_value(it))),
                Err(error) if error.is_timeout() => return Err(error),
                Err(error) => failed.push((name, error)),
            }
        }
        let fatal_error = match values.is_empty() {
            true => failed.pop(),
            false => None,
        };
        for (name, error) in failed {
            let part = format!("{file}, {name}");
            self.contents.add_missing(&part, &error.to_string());
        }
        fatal_error.map_or(Ok(values), |(_, error)| Err(error))
    }

    /// Returns the value, or notes why `file` is missing.
    fn ok_or_note_missing<T>(&mut self, file: &str, result: Result<T, KubectlError>) -> Option<T> {
        match result {
            Ok(value) => {
                self.has_read = true;
                Some(value)
            }
            Err(error) => {
                self.contents.add_missing(file, &error.to_string());
                self.first_error.get_or_insert(error);
                None
            }
        }
    }

    fn add_yaml(&mut self, file: &str, objects: Result<Vec<Value>, KubectlError>) {
        self.add(
            file,
            objects.and_then(|it| encode_list(OutputFormat::Yaml, it)),
        );
    }

    fn add(&mut self, file: &str, text: Result<String, KubectlError>) {
        if let Some(text) = self.ok_or_note_missing(file, text) {
            self.contents.add(file, text);
        }
    }
}

/// Name and data of a ConfigMap.
fn config_map(map: &Value) -> Value {
    let data = map.get("data").and_then(Value::as_object).cloned();
    let data: Map<String, Value> = data
        .unwrap_or_default()
        .into_iter()
        .map(|(key, value)| (key, redacted(&value)))
        .collect();
    json!({"name": map.pointer("/metadata/name"), "data": data})
}

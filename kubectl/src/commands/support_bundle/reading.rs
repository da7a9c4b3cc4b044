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

use super::contents::Contents;
use super::redaction::redacted;
use crate::debug_port::{DebugPort, Question, port_of};
use crate::error::KubectlError;
use crate::home::Connection;
use crate::kind::Kind;
use crate::objects::{DEADLINE, Objects, Scope};
use crate::program::{Program, is_running, programs};
use crate::render::{Output, encode_list, text_at};

/// Objects of one kind: enough for a diagnosis, also in a large fleet.
const OBJECTS_MOST: usize = 2_000;
/// The newest lines of one container's log, and the limits of a request.
const LOG_LINES: i64 = 20_000;
const LOG_LINES_LEAST: i64 = 1_000;
const LOG_BYTES: i64 = 8 << 20;
/// Release Secrets, of which a bundle lists one page.
const RELEASES_MOST: u32 = 500;
/// For all requests.
const BUNDLE_DEADLINE: Duration = Duration::from_secs(300);
/// For all debug ports, which come last because the other parts matter more.
const DUMPS: Duration = Duration::from_secs(60);
/// ConfigMaps of the hub. They contain nothing secret.
const CONFIG_MAPS: [&str; 4] = [
    join_info::NAME,
    CHART_CONFIG_MAP,
    EPOCH_CONFIG_MAP,
    MEMBERS_CONFIG_MAP,
];

/// The parts of a bundle that have been read so far.
pub(super) struct Reading<'a> {
    cluster: &'a Connection,
    contents: Contents,
    /// The first failure, in case nothing can be read.
    failed: Option<KubectlError>,
    has_read: bool,
    processes: Vec<Process>,
}

/// A hub or agent in its pod.
struct Process {
    namespace: String,
    pod: String,
    program: Program,
    port: Option<u16>,
    runs: bool,
}

impl<'a> Reading<'a> {
    pub(super) fn new(cluster: &'a Connection, now: Timestamp) -> Self {
        Self {
            cluster,
            contents: Contents::new(&cluster.context, now),
            failed: None,
            has_read: false,
            processes: Vec::new(),
        }
    }

    /// Reads all parts.
    ///
    /// # Errors
    /// Fails only if no part can be read.
    pub(super) async fn contents(
        mut self,
        namespaces: &[String],
        addresses: &[SocketAddr],
    ) -> Result<Contents, KubectlError> {
        let reading = self.read(namespaces, addresses);
        if tokio::time::timeout(BUNDLE_DEADLINE, reading)
            .await
            .is_err()
        {
            let why = format!("reading took longer than {} s", BUNDLE_DEADLINE.as_secs());
            self.contents.missing("all later parts", &why);
        }
        match self.failed {
            Some(error) if !self.has_read => Err(error),
            _ => Ok(self.contents),
        }
    }

    async fn read(&mut self, namespaces: &[String], addresses: &[SocketAddr]) {
        self.versions().await;
        // First the parts that disappear first, and must have their room.
        let mut found = false;
        for namespace in namespaces {
            found |= self.namespace(namespace).await;
        }
        if !found {
            let names = namespaces.join(" or ");
            let why = format!("none in {names}: name its namespace with -n");
            self.contents.missing("pods and logs of hub or agent", &why);
        }
        for (kind, file) in [
            (Kind::Cluster, "clusters.yaml"),
            (Kind::Tenant, "tenants.yaml"),
            (Kind::Deployment, "deployments.yaml"),
        ] {
            let objects = self.cluster.untyped(kind.resource(), &Scope::All);
            let listed = self.list(&objects, "").await;
            self.yaml(file, listed);
        }
        self.definitions().await;
        self.events(namespaces).await;
        self.releases().await;
        let dumps = tokio::time::timeout(DUMPS, self.dumps(addresses));
        if dumps.await.is_err() {
            let why = format!("the debug ports took longer than {} s", DUMPS.as_secs());
            self.contents.missing("the state of the other pods", &why);
        }
    }

    /// Reads the state of each process.
    async fn dumps(&mut self, addresses: &[SocketAddr]) {
        for address in addresses {
            for program in Program::ALL {
                self.dump(DebugPort::Here(*address), program, "debug").await;
            }
        }
        for process in std::mem::take(&mut self.processes) {
            let folder = format!("{}/debug", process.namespace);
            if !process.runs {
                let file = format!("{folder}/{}.{}", process.pod, process.program.dump());
                self.contents.missing(&file, "its pod does not run");
                continue;
            }
            let port = DebugPort::Pod {
                cluster: self.cluster,
                namespace: &process.namespace,
                name: &process.pod,
                port: process.port,
            };
            self.dump(port, process.program, &folder).await;
        }
    }

    async fn versions(&mut self) {
        let reading = self.cluster.client.apiserver_version();
        let apiserver = call_within(DEADLINE, "reading the version", reading).await;
        let apiserver = apiserver.ok().map(|info| info.git_version);
        let versions =
            json!({"kubectl-krypton": env!("CARGO_PKG_VERSION"), "apiserver": apiserver});
        let text = format!("{versions:#}\n");
        self.contents.add("versions.json", text);
    }

    /// Reads the CRDs without their schemas.
    async fn definitions(&mut self) {
        let file = "crds.yaml";
        let objects = self.objects::<CustomResourceDefinition>(&Scope::All);
        let names = Kind::ALL.map(|kind| {
            let kind = kind.resource();
            format!("{}.{}", kind.plural, kind.group)
        });
        let names = names.each_ref().map(String::as_str);
        let mut found = self.named(&objects, &names, file).await;
        for version in found
            .iter_mut()
            .flatten()
            .filter_map(|crd| crd.pointer_mut("/spec/versions")?.as_array_mut())
            .flatten()
            .filter_map(Value::as_object_mut)
        {
            version.remove("schema");
            version.remove("additionalPrinterColumns");
        }
        let shown = found.map(|found| found.iter().map(redacted).collect());
        self.yaml(file, shown);
    }

    /// Reads the objects of a namespace that may contain hub or agent. Returns false if it contains neither.
    async fn namespace(&mut self, namespace: &str) -> bool {
        let scope = Scope::Namespace(namespace.to_owned());
        let file = format!("{namespace}/leases.yaml");
        let leases = self.objects::<Lease>(&scope);
        let leases = self.named(&leases, &[HUB_LEASE, LEASE_NAME], &file).await;
        let leases = self.noted(&file, leases);
        let mut found = leases.as_ref().is_none_or(|leases| !leases.is_empty());
        if let Some(leases) = leases.filter(|leases| !leases.is_empty()) {
            self.yaml(&file, Ok(leases.iter().map(redacted).collect()));
        }
        let file = format!("{namespace}/configmaps.yaml");
        let maps = self.objects::<ConfigMap>(&scope);
        let maps = self.named(&maps, &CONFIG_MAPS, &file).await;
        if let Some(maps) = self.noted(&file, maps).filter(|maps| !maps.is_empty()) {
            self.yaml(&file, Ok(maps.iter().map(config_map).collect()));
        }
        let file = format!("{namespace}/pods.yaml");
        let pods = self.objects::<Pod>(&scope);
        let pods = self.list(&pods, "").await;
        let Some(mut pods) = self.noted(&file, pods) else {
            return true;
        };
        pods.retain(|pod| programs(pod).next().is_some());
        if pods.is_empty() {
            return found;
        }
        found = true;
        let processes = pods.iter().flat_map(|spec| {
            programs(spec).map(move |program| Process {
                namespace: namespace.to_owned(),
                pod: text_at(spec, "/metadata/name").unwrap_or_default(),
                program,
                port: port_of(spec, program),
                runs: is_running(spec),
            })
        });
        let processes: Vec<Process> = processes.collect();
        self.yaml(&file, Ok(pods));
        for process in &processes {
            for previous in [false, true] {
                self.log(process, previous).await;
            }
        }
        self.processes.extend(processes);
        found
    }

    /// Reads the state of a process. It contains no secrets, but is redacted too.
    async fn dump(&mut self, port: DebugPort<'_>, program: Program, folder: &str) {
        let file = format!("{folder}/{}.{}", port.name(), program.dump());
        let question = Question::get(format!("/debug/{}", program.dump()));
        let shown = match port.ask(&question).await {
            // Only the response of an address shows which program runs there.
            Err(KubectlError::Refused(_)) if matches!(port, DebugPort::Here(_)) => return,
            Err(error) => Err(error),
            Ok(text) => match serde_json::from_str::<Value>(&text) {
                Ok(dump) => Ok(format!("{:#}\n", redacted(&dump))),
                Err(error) => Err(port.silent(&format!("its response is not JSON: {error}"))),
            },
        };
        self.add(&file, shown);
    }

    /// Reads the newest lines, or fewer if they are long or slow: the API server would cut off the newest ones.
    async fn log(&mut self, process: &Process, previous: bool) {
        let (namespace, pod) = (&process.namespace, &process.pod);
        let logs = self.cluster.namespaced::<Pod>(namespace).subresource("log");
        let end = if previous { "previous.log" } else { "log" };
        let file = format!("{namespace}/logs/{pod}.{end}");
        let mut lines = LOG_LINES;
        loop {
            let params = LogParams {
                container: Some(process.program.container().to_owned()),
                previous,
                tail_lines: Some(lines),
                limit_bytes: Some(LOG_BYTES),
                ..LogParams::default()
            };
            let is_cut = |log: &str| i64::try_from(log.len()).is_ok_and(|bytes| bytes >= LOG_BYTES);
            let is_last = lines <= LOG_LINES_LEAST;
            match logs.call("get", "", logs.api.logs(pod, &params)).await {
                Ok(log) if !is_last && is_cut(&log) => {}
                // No container has terminated yet.
                Err(error) if previous && error.code() == Some(400) => return,
                Err(error) if !is_last && error.is_timeout() => {}
                log => {
                    if log.is_ok() && lines < LOG_LINES {
                        let why = format!("only its last {lines} lines are in it");
                        self.contents.missing(&file, &why);
                    }
                    self.add(&file, log.map(|log| redact(&log)));
                    return;
                }
            }
            lines /= 4;
        }
    }

    /// Reads all events of Krypton's kinds, and all events in the namespaces of hub and agent; the newest last.
    async fn events(&mut self, namespaces: &[String]) {
        let near = namespaces.iter().map(|namespace| {
            let scope = Scope::Namespace(namespace.clone());
            (scope, String::new(), format!("{namespace}/events.yaml"))
        });
        let of_kinds = Kind::ALL.map(|kind| {
            let kind = kind.resource().kind;
            let fields = format!("regarding.kind={kind}");
            (Scope::All, fields, format!("events-{kind}.yaml"))
        });
        for (scope, fields, file) in near.chain(of_kinds) {
            let events = self.objects::<Event>(&scope);
            let mut listed = self.list(&events, &fields).await;
            if let Ok(events) = &mut listed {
                events.sort_by_cached_key(|event| {
                    let time = |at| event.pointer(at).and_then(Value::as_str);
                    let last = time("/series/lastObservedTime").or_else(|| time("/eventTime"));
                    let last = last.or_else(|| time("/deprecatedLastTimestamp"));
                    last.unwrap_or_default().to_owned()
                });
            }
            self.yaml(&file, listed);
        }
    }

    /// Reads names and labels of Helm's release Secrets, without their data.
    async fn releases(&mut self) {
        let secrets = self.cluster.all::<Secret>();
        let params = ListParams::default()
            .labels("owner=helm")
            .fields("type=helm.sh/release.v1")
            .limit(RELEASES_MOST);
        let file = "releases.yaml";
        let listing = secrets.api.list_metadata(&params);
        let listed = secrets.call("list", "", listing).await;
        if let Ok(list) = &listed
            && list
                .metadata
                .continue_
                .as_deref()
                .is_some_and(|more| !more.is_empty())
        {
            let why = format!("only the first {RELEASES_MOST} are in it");
            self.contents.missing(file, &why);
        }
        let shown = listed.map(|list| {
            let shown = list.items.iter().map(|secret| {
                json!({
                    "namespace": secret.namespace(),
                    "name": secret.name_any(),
                    "created": secret.creation_timestamp(),
                    "labels": secret.labels(),
                })
            });
            shown.collect()
        });
        self.yaml(file, shown);
    }

    fn objects<K: Resource<DynamicType = ()>>(&self, scope: &Scope) -> Objects<DynamicObject> {
        self.cluster.untyped(ApiResource::erase::<K>(&()), scope)
    }

    /// Lists redacted objects, up to a limit.
    async fn list(
        &mut self,
        objects: &Objects<DynamicObject>,
        fields: &str,
    ) -> Result<Vec<Value>, KubectlError> {
        let mut shown = Vec::new();
        // Redacts page by page, because values may be large.
        let take = |page: Vec<DynamicObject>| {
            shown.extend(page.into_iter().map(|it| redacted(&objects.value(it))));
            shown.len() < OBJECTS_MOST
        };
        let params = ListParams::default().fields(fields);
        if !objects.pages(params, take).await? {
            let part = format!("more {}", objects.kind.plural);
            let why = format!("only the first {} are in it", shown.len());
            self.contents.missing(&part, &why);
        }
        Ok(shown)
    }

    /// Reads the existing objects among `names`. Notes failed ones as parts of `file`, unless all fail.
    async fn named(
        &mut self,
        objects: &Objects<DynamicObject>,
        names: &[&str],
        file: &str,
    ) -> Result<Vec<Value>, KubectlError> {
        let (mut found, mut failed) = (Vec::new(), Vec::new());
        for name in names {
            match objects.find(name).await {
                Ok(object) => found.extend(object.map(|it| objects.value(it))),
                Err(error) if error.is_timeout() => return Err(error),
                Err(error) => failed.push((name, error)),
            }
        }
        let last = match found.is_empty() {
            true => failed.pop(),
            false => None,
        };
        for (name, error) in failed {
            let part = format!("{file}, {name}");
            self.contents.missing(&part, &error.to_string());
        }
        last.map_or(Ok(found), |(_, error)| Err(error))
    }

    /// Returns a result, or notes why `file` is missing.
    fn noted<T>(&mut self, file: &str, result: Result<T, KubectlError>) -> Option<T> {
        match result {
            Ok(read) => {
                self.has_read = true;
                Some(read)
            }
            Err(error) => {
                self.contents.missing(file, &error.to_string());
                self.failed.get_or_insert(error);
                None
            }
        }
    }

    fn yaml(&mut self, file: &str, shown: Result<Vec<Value>, KubectlError>) {
        self.add(file, shown.and_then(|it| encode_list(Output::Yaml, it)));
    }

    fn add(&mut self, file: &str, text: Result<String, KubectlError>) {
        if let Some(text) = self.noted(file, text) {
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

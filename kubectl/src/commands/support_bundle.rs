//! `kubectl krypton support-bundle`: what somebody else needs to help, in one file and without secrets. It reads
//! with the user's rights; what it may not read is named in the file, and is no failure.

mod contents;
mod redaction;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_crds::tenant::Tenant;
use krypton_runtime::lease::LEASE_NAME;
use krypton_types::join_info;
use krypton_types::names::{
    CHART_CONFIG_MAP, EPOCH_CONFIG_MAP, HUB_LEASE, MEMBERS_CONFIG_MAP, namespace_name,
};
use krypton_types::redact::redact;
use kube::api::{Api, DynamicObject, ListParams, LogParams};
use kube::core::ApiResource;
use kube::{CustomResourceExt as _, Resource, ResourceExt};
use serde_json::{Map, Value, json};

use super::join;
use crate::debug_port::{DebugPort, Program, Question, is_running, loopback, port_of};
use crate::error::{KubectlError, call_failed};
use crate::home::{Connection, HomeArgs, PAGE_SIZE, Place, as_value, connect};
use crate::render::{Output, Printed, encode};
use contents::Contents;
#[cfg(test)]
pub(crate) use contents::tests::unpacked;

/// Objects of one kind: enough to see what is the matter, also of a large fleet.
const OBJECTS_MOST: usize = 2_000;
/// The newest lines of one container's log.
const LOG_LINES: i64 = 20_000;
const LOG_BYTES: i64 = 8 << 20;
/// Fewer are not asked for.
const LOG_LINES_LEAST: i64 = 1_000;
/// After this nothing more is asked for.
const DEADLINE: Duration = Duration::from_secs(300);
/// Of all debug ports, the last that is asked: what else is in it matters more.
const DUMPS: Duration = Duration::from_secs(60);
/// ConfigMaps of the hub of which the content is shown; there is nothing secret in them.
const CONFIG_MAPS: [&str; 4] = [
    join_info::NAME,
    CHART_CONFIG_MAP,
    EPOCH_CONFIG_MAP,
    MEMBERS_CONFIG_MAP,
];

#[derive(Clone, Debug, Args)]
pub(crate) struct SupportBundle {
    /// The file to be made; by default krypton-support-TIME.tar.gz here. One that is there is not written over.
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Namespace of the hub, or of the agent; by default krypton-system, krypton, and that of the context.
    #[arg(short, long, value_name = "NAMESPACE", value_parser = namespace_name)]
    namespace: Option<String>,
    /// Debug ports beside those of pods.
    #[arg(long, hide = true, value_name = "HOST:PORT", value_parser = loopback)]
    debug_address: Vec<SocketAddr>,
    #[command(flatten)]
    home: HomeArgs,
}

pub(crate) async fn run(
    args: SupportBundle,
    env: &dyn Fn(&str) -> Option<String>,
    now: Timestamp,
) -> Result<Printed, KubectlError> {
    let cluster = connect(&args.home, env).await?;
    let file = args.file.unwrap_or_else(|| {
        let time = now.strftime("%Y%m%dT%H%M%SZ");
        PathBuf::from(format!("krypton-support-{time}.tar.gz"))
    });
    // Before minutes are spent on it.
    if file.exists() {
        let why = format!("{} is there already; name another file", file.display());
        return Err(KubectlError::Refused { why });
    }
    let places = join::places(args.namespace.as_deref(), &cluster.namespace);
    let mut reading = Reading {
        cluster: &cluster,
        contents: Contents::new(&cluster.context, now),
        failed: None,
        read: false,
        processes: Vec::new(),
    };
    if tokio::time::timeout(DEADLINE, reading.all(&places, &args.debug_address))
        .await
        .is_err()
    {
        reading
            .contents
            .missing("what comes after that", "it took longer than five minutes");
    }
    let Reading {
        contents,
        failed,
        read,
        ..
    } = reading;
    if let (false, Some(error)) = (read, failed) {
        return Err(error);
    }
    let left_out = contents.left_out();
    write(&file, contents)?;
    Ok(Printed {
        stdout: format!("{}\n", file.display()),
        stderr: match left_out {
            0 => String::new(),
            count => format!("{count} parts are not in it; its README.txt says which, and why\n"),
        },
    })
}

/// What is read of one cluster, as far as that goes.
struct Reading<'a> {
    cluster: &'a Connection,
    contents: Contents,
    /// The first failure, for when nothing can be read at all.
    failed: Option<KubectlError>,
    read: bool,
    /// Seen in the namespaces.
    processes: Vec<Process>,
}

impl Reading<'_> {
    async fn all(&mut self, namespaces: &[String], addresses: &[SocketAddr]) {
        self.versions().await;
        // First what is gone first, and must have its room.
        let mut here = false;
        for namespace in namespaces {
            here |= self.near(namespace).await;
        }
        if !here {
            let why = format!(
                "none in {}: name its namespace with -n",
                namespaces.join(" or ")
            );
            self.contents.missing("pods and logs of hub or agent", &why);
        }
        self.objects::<EdgeCluster>("clusters.yaml").await;
        self.objects::<Tenant>("tenants.yaml").await;
        self.objects::<KryptonDeployment>("deployments.yaml").await;
        self.definitions().await;
        self.events(namespaces).await;
        self.releases().await;
        if tokio::time::timeout(DUMPS, self.dumps(addresses))
            .await
            .is_err()
        {
            let why = format!("the debug ports took longer than {} s", DUMPS.as_secs());
            self.contents.missing("what the other pods tell", &why);
        }
    }

    /// What each process tells of itself.
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
        let asked = self.cluster.client.apiserver_version();
        let apiserver = match self.cluster.in_time(asked).await {
            Ok(Ok(info)) => Value::from(info.git_version),
            _ => Value::Null,
        };
        let versions =
            json!({"kubectl-krypton": env!("CARGO_PKG_VERSION"), "apiserver": apiserver});
        self.contents
            .add("versions.json", format!("{versions:#}\n"));
    }

    async fn objects<K: Resource<DynamicType = ()>>(&mut self, file: &str) {
        let kind = ApiResource::erase::<K>(&());
        let listed = self.list(&kind, &Place::Cluster, "").await;
        if let Some(objects) = self.had(file, listed) {
            self.yaml(file, objects);
        }
    }

    /// The CRDs without their schemas.
    async fn definitions(&mut self) {
        let kind = ApiResource::erase::<CustomResourceDefinition>(&());
        let names = [
            EdgeCluster::crd_name(),
            Tenant::crd_name(),
            KryptonDeployment::crd_name(),
        ];
        let found = self
            .named(&kind, &Place::Cluster, &names, "crds.yaml")
            .await;
        let Some(mut found) = self.had("crds.yaml", found) else {
            return;
        };
        for version in found
            .iter_mut()
            .filter_map(|crd| crd.pointer_mut("/spec/versions")?.as_array_mut())
            .flatten()
            .filter_map(Value::as_object_mut)
        {
            version.remove("schema");
            version.remove("additionalPrinterColumns");
        }
        let shown: Vec<Value> = found.iter().map(redaction::shown).collect();
        self.yaml("crds.yaml", shown);
    }

    /// What is in a namespace that hub or agent may run in; whether one of them was seen there, or might have been.
    async fn near(&mut self, namespace: &str) -> bool {
        let place = Place::Namespace(namespace.to_owned());
        let kind = ApiResource::erase::<Lease>(&());
        let file = format!("{namespace}/leases.yaml");
        let leases = self
            .named(&kind, &place, &[HUB_LEASE, LEASE_NAME], &file)
            .await;
        let leases = self.had(&file, leases);
        let mut here = leases.as_ref().is_none_or(|leases| !leases.is_empty());
        if let Some(leases) = leases.filter(|leases| !leases.is_empty()) {
            let shown: Vec<Value> = leases.iter().map(redaction::shown).collect();
            self.yaml(&file, shown);
        }
        let kind = ApiResource::erase::<ConfigMap>(&());
        let file = format!("{namespace}/configmaps.yaml");
        let maps = self.named(&kind, &place, &CONFIG_MAPS, &file).await;
        if let Some(maps) = self.had(&file, maps).filter(|maps| !maps.is_empty()) {
            let told = |map: &Value| {
                let data = map.get("data").and_then(Value::as_object).cloned();
                let data = data.unwrap_or_default().into_iter();
                let data: Map<String, Value> = data
                    .map(|(key, value)| (key, redaction::shown(&value)))
                    .collect();
                json!({"name": map.pointer("/metadata/name"), "data": data})
            };
            let told: Vec<Value> = maps.iter().map(told).collect();
            self.yaml(&file, told);
        }
        let kind = ApiResource::erase::<Pod>(&());
        let file = format!("{namespace}/pods.yaml");
        let pods = self.list(&kind, &place, "").await;
        let Some(mut pods) = self.had(&file, pods) else {
            return true;
        };
        pods.retain(|pod| containers(pod).next().is_some());
        if pods.is_empty() {
            return here;
        }
        here = true;
        let named = |pod: &Value| Some(pod.pointer("/metadata/name")?.as_str()?.to_owned());
        let of_pods: Vec<Process> = pods
            .iter()
            .filter_map(|pod| Some((named(pod)?, pod)))
            .flat_map(|(pod, spec)| {
                containers(spec).map(move |program| Process {
                    namespace: namespace.to_owned(),
                    pod: pod.clone(),
                    program,
                    port: port_of(spec, program.container()),
                    runs: is_running(spec),
                })
            })
            .collect();
        self.yaml(&file, pods);
        for process in &of_pods {
            for previous in [false, true] {
                let container = process.program.container();
                self.log(namespace, &process.pod, container, previous).await;
            }
        }
        self.processes.extend(of_pods);
        here
    }

    /// What a process tells of itself. It is made without secrets, and goes through the same hands as all else.
    async fn dump(&mut self, port: DebugPort<'_>, program: Program, folder: &str) {
        let file = format!("{folder}/{}.{}", port.whose(), program.dump());
        let question = Question::get(format!("/debug/{}", program.dump()));
        let shown = match port.ask(&question).await {
            // Which program is there only its answers tell.
            Err(KubectlError::Refused { .. }) if matches!(port, DebugPort::Here(_)) => return,
            Err(error) => Err(error),
            Ok(text) => match serde_json::from_str::<Value>(&text) {
                Ok(dump) => Ok(format!("{:#}\n", redaction::shown(&dump))),
                Err(error) => Err(KubectlError::DebugPort {
                    whose: port.whose(),
                    reason: format!("its answer is no JSON: {error}"),
                }),
            },
        };
        self.put(&file, shown);
    }

    /// The newest lines, and fewer of them where they are long or come slowly: the apiserver cuts a log off at its end.
    async fn log(&mut self, namespace: &str, pod: &str, container: &str, previous: bool) {
        let pods: Api<Pod> = Api::namespaced(self.cluster.client.clone(), namespace);
        let end = if previous { "previous.log" } else { "log" };
        let file = format!("{namespace}/logs/{pod}.{end}");
        let mut lines = LOG_LINES;
        loop {
            let params = LogParams {
                container: Some(container.to_owned()),
                previous,
                tail_lines: Some(lines),
                limit_bytes: Some(LOG_BYTES),
                ..LogParams::default()
            };
            let cut = |log: &str| i64::try_from(log.len()).is_ok_and(|bytes| bytes >= LOG_BYTES);
            let few = lines <= LOG_LINES_LEAST;
            match self.cluster.in_time(pods.logs(pod, &params)).await {
                Ok(Ok(log)) if few || !cut(&log) => {
                    self.read = true;
                    self.contents.add(&file, redact(&log));
                    if lines < LOG_LINES {
                        let why = format!("only its last {lines} lines are in it");
                        self.contents.missing(&file, &why);
                    }
                    return;
                }
                Ok(Ok(_)) => {}
                // There is none before the first restart.
                Ok(Err(kube::Error::Api(status))) if previous && status.code == 400 => return,
                Ok(Err(error)) => {
                    let kind = ApiResource {
                        plural: "pods/log".to_owned(),
                        ..ApiResource::erase::<Pod>(&())
                    };
                    let place = Place::Namespace(namespace.to_owned());
                    let error = call_failed(error, "get", &kind, &place, &self.cluster.context);
                    self.had::<()>(&file, Err(error));
                    return;
                }
                Err(error) if few => {
                    self.had::<()>(&file, Err(error));
                    return;
                }
                Err(_) => {}
            }
            lines /= 4;
        }
    }

    /// Of Krypton's kinds everywhere, and of all in the namespaces of hub and agent; the newest last.
    async fn events(&mut self, namespaces: &[String]) {
        let kind = ApiResource::erase::<Event>(&());
        let near = namespaces.iter().map(|namespace| {
            let place = Place::Namespace(namespace.clone());
            (place, String::new(), format!("{namespace}/events.yaml"))
        });
        let of_kinds = ["EdgeCluster", "Tenant", "KryptonDeployment"].map(|of| {
            let fields = format!("regarding.kind={of}");
            (Place::Cluster, fields, format!("events-{of}.yaml"))
        });
        for (place, fields, file) in near.chain(of_kinds) {
            let listed = self.list(&kind, &place, &fields).await;
            let Some(mut events) = self.had(&file, listed) else {
                continue;
            };
            events.sort_by_cached_key(|event| {
                let time = |at| event.pointer(at).and_then(Value::as_str);
                let last = time("/series/lastObservedTime").or_else(|| time("/eventTime"));
                last.or_else(|| time("/deprecatedLastTimestamp"))
                    .unwrap_or_default()
                    .to_owned()
            });
            self.yaml(&file, events);
        }
    }

    /// Names and labels of Helm's release Secrets, without what they hold.
    async fn releases(&mut self) {
        let kind = ApiResource::erase::<Secret>(&());
        let secrets: Api<Secret> = Api::all(self.cluster.client.clone());
        let params = ListParams::default()
            .labels("owner=helm")
            .fields("type=helm.sh/release.v1")
            .limit(PAGE_SIZE);
        let file = "releases.yaml";
        let listed = match self.cluster.in_time(secrets.list_metadata(&params)).await {
            Ok(listed) => listed.map_err(|error| {
                call_failed(error, "list", &kind, &Place::Cluster, &self.cluster.context)
            }),
            Err(error) => Err(error),
        };
        if let Some(list) = self.had(file, listed) {
            if list.metadata.continue_.is_some_and(|more| !more.is_empty()) {
                self.contents
                    .missing(file, "there are more, of which none is in it");
            }
            let shown = list.items.iter().map(|secret| {
                json!({
                    "namespace": secret.namespace(),
                    "name": secret.name_any(),
                    "created": secret.creation_timestamp(),
                    "labels": secret.labels(),
                })
            });
            let shown = shown.collect();
            self.yaml(file, shown);
        }
    }

    /// As they may be shown.
    async fn list(
        &mut self,
        kind: &ApiResource,
        place: &Place,
        fields: &str,
    ) -> Result<Vec<Value>, KubectlError> {
        let client = self.cluster.client.clone();
        let api: Api<DynamicObject> = match place {
            Place::Cluster => Api::all_with(client, kind),
            Place::Namespace(namespace) => Api::namespaced_with(client, namespace, kind),
        };
        let mut params = ListParams::default().fields(fields).limit(PAGE_SIZE);
        let mut objects = Vec::new();
        loop {
            let page = self.cluster.in_time(api.list(&params)).await?;
            let page = page
                .map_err(|error| call_failed(error, "list", kind, place, &self.cluster.context))?;
            // At once, since values may be large.
            for object in page.items {
                objects.push(redaction::shown(&as_value(object, kind)?));
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(_) if objects.len() >= OBJECTS_MOST => {
                    let why = format!("only the first {} are in it", objects.len());
                    self.contents
                        .missing(&format!("more {}", kind.plural), &why);
                    return Ok(objects);
                }
                Some(token) => params = params.continue_token(&token),
                None => return Ok(objects),
            }
        }
    }

    /// Those of these names that there are, as they are; of `file`, for what is refused.
    async fn named(
        &mut self,
        kind: &ApiResource,
        place: &Place,
        names: &[&str],
        file: &str,
    ) -> Result<Vec<Value>, KubectlError> {
        let client = self.cluster.client.clone();
        let api: Api<DynamicObject> = match place {
            Place::Cluster => Api::all_with(client, kind),
            Place::Namespace(namespace) => Api::namespaced_with(client, namespace, kind),
        };
        let mut found = Vec::new();
        let mut refused = None;
        for name in names {
            match self.cluster.in_time(api.get_opt(name)).await? {
                Ok(Some(object)) => found.push(as_value(object, kind)?),
                Ok(None) => {}
                Err(error) => {
                    let error = call_failed(error, "get", kind, place, &self.cluster.context);
                    if let Some((before, why)) = refused.replace((name, error)) {
                        self.contents
                            .missing(&format!("{file}, {before}"), &why.to_string());
                    }
                }
            }
        }
        match refused {
            Some((_, error)) if found.is_empty() => Err(error),
            Some((name, error)) => {
                self.contents
                    .missing(&format!("{file}, {name}"), &error.to_string());
                Ok(found)
            }
            None => Ok(found),
        }
    }

    /// What was read, or a note of what was not.
    fn had<T>(&mut self, file: &str, result: Result<T, KubectlError>) -> Option<T> {
        match result {
            Ok(read) => {
                self.read = true;
                Some(read)
            }
            Err(error) => {
                self.contents.missing(file, &error.to_string());
                self.failed.get_or_insert(error);
                None
            }
        }
    }

    fn yaml(&mut self, file: &str, shown: Vec<Value>) {
        self.put(file, encode(Output::Yaml, shown));
    }

    fn put(&mut self, file: &str, text: Result<String, KubectlError>) {
        if let Some(text) = self.had(file, text) {
            self.contents.add(file, text);
        }
    }
}

/// A hub or agent in its pod.
struct Process {
    namespace: String,
    pod: String,
    program: Program,
    port: Option<u16>,
    runs: bool,
}

fn containers(pod: &Value) -> impl Iterator<Item = Program> {
    let containers = pod.pointer("/spec/containers").and_then(Value::as_array);
    let names = containers.into_iter().flatten();
    let names = names.filter_map(|container| container.get("name")?.as_str());
    names.filter_map(Program::of)
}

/// Whole or not at all, for its owner alone, and over no file that is there.
fn write(file: &Path, contents: Contents) -> Result<(), KubectlError> {
    let failed = |error: std::io::Error| KubectlError::Write {
        reason: format!("{}: {error}", file.display()),
    };
    let folder = match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let temporary = tempfile::NamedTempFile::new_in(folder).map_err(failed)?;
    contents.write(temporary.as_file()).map_err(failed)?;
    let kept = temporary.persist_noclobber(file);
    kept.map_err(|error| failed(error.error))?;
    Ok(())
}

//! The watches on a member: their requests, and the conversion of their events for the index.

use std::fmt::Debug;

use futures::stream::{BoxStream, SelectAll};
use futures::{Stream, StreamExt};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{Namespace, Secret};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_crds::tenant::Tenant;
use krypton_helm::releases::WorkloadKind;
use krypton_runtime::watch;
use kube::api::Api;
use kube::core::{ApiResource, DeserializeGuard, PartialObjectMeta};
use kube::runtime::watcher::{self, Config, Event, watcher};
use kube::{Client, CustomResourceExt};
use serde::de::DeserializeOwned;

use crate::workload::WorkloadObject;

/// Maximum number of objects in a response. The process never returns the memory for decoding a list. A single list of
/// 300 Tenants, kube's default, would take more memory than the index needs for them.
const PAGE_SIZE: u32 = 50;

/// An event of one of the watches.
pub(super) enum WatchEvent {
    Tenant(Box<Event<DeserializeGuard<Tenant>>>),
    Release(Event<PartialObjectMeta<Secret>>),
    Workspace(Event<PartialObjectMeta<Namespace>>),
    Workload(WorkloadKind, Event<WorkloadObject>),
    Crd(Event<PartialObjectMeta<CustomResourceDefinition>>),
    Failed {
        resource: &'static str,
        error: watcher::Error,
    },
}

pub(super) type Watch = BoxStream<'static, WatchEvent>;

/// Returns all watches except the one on Tenants, which needs the CRD first.
pub(super) fn all_except_tenants(client: &Client) -> SelectAll<Watch> {
    let workloads = |kind: ApiResource| {
        let api: Api<WorkloadObject> = Api::all_with(client.clone(), &kind);
        move || watcher(api.clone(), helm_objects())
    };
    let release_config = paged()
        .labels("owner=helm")
        .fields("type=helm.sh/release.v1");
    let crd_config = paged().fields(&format!("metadata.name={}", Tenant::crd_name()));
    futures::stream::select_all([
        // This process creates the CRD. If the first list lacks an existing CRD, no event corrects that.
        events_of(
            "CRD",
            watch::Watch::new(metadata_watch(client, crd_config)).expecting_objects(),
            WatchEvent::Crd,
        ),
        stream(
            "Secrets",
            metadata_watch(client, release_config),
            WatchEvent::Release,
        ),
        stream(
            "namespaces",
            metadata_watch(client, paged()),
            WatchEvent::Workspace,
        ),
        stream(
            "Deployments",
            workloads(ApiResource::erase::<Deployment>(&())),
            |event| WatchEvent::Workload(WorkloadKind::Deployment, event),
        ),
        stream(
            "StatefulSets",
            workloads(ApiResource::erase::<StatefulSet>(&())),
            |event| WatchEvent::Workload(WorkloadKind::StatefulSet, event),
        ),
        stream(
            "DaemonSets",
            workloads(ApiResource::erase::<DaemonSet>(&())),
            |event| WatchEvent::Workload(WorkloadKind::DaemonSet, event),
        ),
    ])
}

fn paged() -> Config {
    Config::default().page_size(PAGE_SIZE)
}

/// Selects the objects of Helm releases, which all have this label.
fn helm_objects() -> Config {
    paged().labels("app.kubernetes.io/managed-by=Helm")
}

/// Returns the watch on Tenants. A Tenant that does not decode must not stop the others.
pub(super) fn tenants(client: &Client) -> Watch {
    let api: Api<DeserializeGuard<Tenant>> = Api::all(client.clone());
    stream(
        "Tenants",
        move || watcher(api.clone(), paged()),
        |event| WatchEvent::Tenant(Box::new(event)),
    )
}

/// Returns a factory for a watch on the metadata of the objects that match `config`.
fn metadata_watch<K>(
    client: &Client,
    config: Config,
) -> impl Fn() -> BoxStream<'static, watcher::Result<Event<PartialObjectMeta<K>>>> + Send + 'static
where
    PartialObjectMeta<K>:
        kube::Resource<DynamicType = ()> + DeserializeOwned + Clone + Debug + Send + 'static,
    K: 'static,
{
    let api: Api<PartialObjectMeta<K>> = Api::all(client.clone());
    move || watcher(api.clone(), config.clone()).boxed()
}

fn stream<K: Send + 'static, W>(
    resource: &'static str,
    open: impl Fn() -> W + Send + 'static,
    to_event: fn(Event<K>) -> WatchEvent,
) -> Watch
where
    W: Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
{
    events_of(resource, watch::Watch::new(open), to_event)
}

fn events_of<K: Send + 'static>(
    resource: &'static str,
    watch: watch::Watch<K>,
    to_event: fn(Event<K>) -> WatchEvent,
) -> Watch {
    watch
        .into_stream()
        .map(move |event| match event {
            Ok(event) => to_event(event),
            Err(error) => WatchEvent::Failed { resource, error },
        })
        .boxed()
}

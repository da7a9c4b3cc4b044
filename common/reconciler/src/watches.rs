//! The watches on a member: their requests, and the conversion of their events for the index.

use futures::StreamExt;
use futures::stream::{BoxStream, SelectAll};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{Namespace, Secret};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_crds::tenant::Tenant;
use krypton_helm::releases::WorkloadKind;
use krypton_runtime::watch;
use kube::api::Api;
use kube::core::{ApiResource, DeserializeGuard, PartialObjectMeta};
use kube::runtime::watcher::{self, Config, Event};
use kube::{Client, CustomResourceExt};

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
    let crds: Api<PartialObjectMeta<CustomResourceDefinition>> = Api::all(client.clone());
    let crd_config = paged().fields(&format!("metadata.name={}", Tenant::crd_name()));
    let releases: Api<PartialObjectMeta<Secret>> = Api::all(client.clone());
    let release_config = paged()
        .labels("owner=helm")
        .fields("type=helm.sh/release.v1");
    let namespaces: Api<PartialObjectMeta<Namespace>> = Api::all(client.clone());
    let workloads = |kind: ApiResource| {
        let api: Api<WorkloadObject> = Api::all_with(client.clone(), &kind);
        // All objects of Helm releases have this label.
        watch::Watch::objects(api, paged().labels("app.kubernetes.io/managed-by=Helm"))
    };
    futures::stream::select_all([
        stream(
            "CRD",
            watch::Watch::objects(crds, crd_config),
            WatchEvent::Crd,
        ),
        stream(
            "Secrets",
            watch::Watch::objects(releases, release_config),
            WatchEvent::Release,
        ),
        stream(
            "namespaces",
            watch::Watch::objects(namespaces, paged()),
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

/// Returns the watch on Tenants. A Tenant that does not decode must not stop the others.
pub(super) fn tenants(client: &Client) -> Watch {
    let api: Api<DeserializeGuard<Tenant>> = Api::all(client.clone());
    stream("Tenants", watch::Watch::objects(api, paged()), |event| {
        WatchEvent::Tenant(Box::new(event))
    })
}

fn stream<K: Send + 'static>(
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

//! The watches on a member: what is asked for, and how their events reach the index.

use futures::StreamExt;
use futures::stream::{BoxStream, SelectAll};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment, StatefulSet};
use k8s_openapi::api::core::v1::{Namespace, Secret};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_crds::tenant::Tenant;
use kube::api::Api;
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Config, Event, watcher};
use kube::{Client, CustomResourceExt};

use crate::watch_backoff::WatchBackoff;

/// Objects in an answer. What a list takes to decode stays with the process for good: in one piece, as
/// kube would ask for it, that of 300 Tenants is more than all that is kept of them.
const PAGE: u32 = 50;

/// One event of one of the watches.
pub(super) enum Seen {
    Tenant(Event<DeserializeGuard<Tenant>>),
    Release(Event<PartialObjectMeta<Secret>>),
    Workspace(Event<PartialObjectMeta<Namespace>>),
    Deployment(Event<Deployment>),
    StatefulSet(Event<StatefulSet>),
    DaemonSet(Event<DaemonSet>),
    Crd(Event<PartialObjectMeta<CustomResourceDefinition>>),
    Failed {
        what: &'static str,
        error: watcher::Error,
    },
}

pub(super) type Watch = BoxStream<'static, Seen>;

/// All watches but the one on Tenants, which needs the CRD first.
pub(super) fn all_but_tenants(client: &Client) -> SelectAll<Watch> {
    // Helm marks every object of a release with this label.
    let helms = || all().labels("app.kubernetes.io/managed-by=Helm");
    let releases = all().labels("owner=helm").fields("type=helm.sh/release.v1");
    let crd = all().fields(&format!("metadata.name={}", Tenant::crd_name()));
    futures::stream::select_all([
        stream("CRD", watcher(Api::all(client.clone()), crd), Seen::Crd),
        stream(
            "Secrets",
            watcher(Api::all(client.clone()), releases),
            Seen::Release,
        ),
        stream(
            "namespaces",
            watcher(Api::all(client.clone()), all()),
            Seen::Workspace,
        ),
        stream(
            "Deployments",
            watcher(Api::all(client.clone()), helms()),
            Seen::Deployment,
        ),
        stream(
            "StatefulSets",
            watcher(Api::all(client.clone()), helms()),
            Seen::StatefulSet,
        ),
        stream(
            "DaemonSets",
            watcher(Api::all(client.clone()), helms()),
            Seen::DaemonSet,
        ),
    ])
}

fn all() -> Config {
    Config::default().page_size(PAGE)
}

/// The watch on Tenants. One that does not decode must not stop the others.
pub(super) fn tenants(client: &Client) -> Watch {
    let api: Api<DeserializeGuard<Tenant>> = Api::all(client.clone());
    stream("Tenants", watcher(api, all()), Seen::Tenant)
}

fn stream<K: Send + 'static>(
    what: &'static str,
    events: impl futures::Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
    seen: fn(Event<K>) -> Seen,
) -> Watch {
    events
        .backoff(WatchBackoff::default())
        .map(move |event| match event {
            Ok(event) => seen(event),
            Err(error) => Seen::Failed { what, error },
        })
        .boxed()
}

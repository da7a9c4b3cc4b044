//! Watches the API servers continuously: all objects of the chart on an edge cluster, and the epochs that write home's
//! objects.

use std::{collections::BTreeSet, fmt::Debug, sync::Arc, time::Duration};

use futures::StreamExt;
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{ConfigMap, Service},
};
use krypton_crds::{edge_cluster::EdgeCluster, tenant::Tenant};
use kube::{
    Api, Client, Resource, ResourceExt,
    runtime::watcher::{Config, Event, watcher},
};
use serde::de::DeserializeOwned;
use tokio_util::task::AbortOnDropHandle;

use super::{
    expected_state::ExpectedState,
    snapshot::{RELEASE_ANNOTATION, object_key},
    whom::{Edge, Object},
};

const RETRY_PAUSE: Duration = Duration::from_millis(300);

/// A watch that runs until it is dropped.
type Watch = AbortOnDropHandle<()>;

/// Watches all objects of the chart on an edge cluster.
pub(crate) fn watch_edge(edge: Edge, client: &Client, state: &Arc<ExpectedState>) -> [Watch; 3] {
    [
        watch_objects::<ConfigMap>(edge, Object::ConfigMap, client, state),
        watch_objects::<Service>(edge, Object::Service, client, state),
        watch_objects::<Deployment>(edge, Object::Deployment, client, state),
    ]
}

/// Watches the epochs on the home cluster.
pub(crate) fn watch_home(home: &Client, state: &Arc<ExpectedState>) -> [Watch; 2] {
    let tenant = |tenant: &Tenant| tenant.status.as_ref()?.hub_epoch;
    let member = |member: &EdgeCluster| member.status.as_ref()?.hub_epoch;
    [
        watch_epochs(tenant, home, state),
        watch_epochs(member, home, state),
    ]
}

fn watch_objects<K: WatchedObject>(
    edge: Edge,
    kind: Object,
    client: &Client,
    expected_state: &Arc<ExpectedState>,
) -> Watch {
    let expected_state = Arc::clone(expected_state);
    let config = Config::default().labels("app.kubernetes.io/managed-by=Helm");
    let mut listed = BTreeSet::new();
    watch(client, config, move |event: Event<K>| match event {
        Event::Init => listed.clear(),
        Event::InitApply(object) => {
            listed.insert(object_key(object.meta()));
            record_object(&expected_state, edge, kind, &object);
        }
        Event::InitDone => expected_state.record_list(edge, kind, &listed),
        Event::Apply(object) => record_object(&expected_state, edge, kind, &object),
        Event::Delete(object) => {
            expected_state.record_deletion(edge, kind, &object_key(object.meta()));
        }
    })
}

fn watch_epochs<K: WatchedObject>(
    epoch_of: fn(&K) -> Option<u64>,
    client: &Client,
    expected_state: &Arc<ExpectedState>,
) -> Watch {
    let expected_state = Arc::clone(expected_state);
    watch(client, Config::default(), move |event: Event<K>| {
        if let Event::InitApply(object) | Event::Apply(object) = event
            && let Some(epoch) = epoch_of(&object)
        {
            let what = format!("{} {}", K::kind(&()), object.name_any());
            expected_state.record_write(&what, &object.uid().unwrap_or_default(), epoch);
        }
    })
}

trait WatchedObject:
    Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static
{
}

impl<K> WatchedObject for K where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static
{
}

/// Watches all objects of a kind in the background.
fn watch<K: WatchedObject>(
    client: &Client,
    config: Config,
    mut on_event: impl FnMut(Event<K>) + Send + 'static,
) -> Watch {
    let api: Api<K> = Api::all(client.clone());
    AbortOnDropHandle::new(tokio::spawn(async move {
        let mut events = watcher(api, config).boxed();
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => on_event(event),
                // The API server is down.
                Err(_) => tokio::time::sleep(RETRY_PAUSE).await,
            }
        }
    }))
}

fn record_object<K: Resource<DynamicType = ()>>(
    expected_state: &ExpectedState,
    edge: Edge,
    kind: Object,
    object: &K,
) {
    let release = object.annotations().get(RELEASE_ANNOTATION);
    if let Some(release) = release.filter(|release| release.starts_with("tenant-")) {
        let uid = object.uid().unwrap_or_default();
        expected_state.record_object(edge, kind, &object_key(object.meta()), release, &uid);
    }
}

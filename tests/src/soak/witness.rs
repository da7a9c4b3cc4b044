//! Watches the API servers continuously: all objects of the chart on an edge cluster, and the epochs that write home's
//! objects.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

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
use tokio::task::JoinHandle;

use super::{
    expected_state::ExpectedState,
    snapshot::ObjectKey,
    whom::{Edge, Object},
};

const RETRY_PAUSE: Duration = Duration::from_millis(300);
const RELEASE_ANNOTATION: &str = "meta.helm.sh/release-name";

/// A watch that runs until it is dropped.
#[derive(Debug)]
pub(crate) struct FleetWatch(Vec<JoinHandle<()>>);

impl FleetWatch {
    pub(crate) fn start(edge: Edge, client: &Client, expected_state: &Arc<ExpectedState>) -> Self {
        Self(vec![
            watch_objects::<ConfigMap>(edge, Object::ConfigMap, client, expected_state),
            watch_objects::<Service>(edge, Object::Service, client, expected_state),
            watch_objects::<Deployment>(edge, Object::Deployment, client, expected_state),
        ])
    }
}

impl FleetWatch {
    /// Watches the home cluster.
    pub(crate) fn start_home(home: &Client, expected_state: &Arc<ExpectedState>) -> Self {
        let tenant = |tenant: &Tenant| tenant.status.as_ref()?.hub_epoch;
        let member = |member: &EdgeCluster| member.status.as_ref()?.hub_epoch;
        Self(vec![
            watch_epochs(tenant, home, expected_state),
            watch_epochs(member, home, expected_state),
        ])
    }
}

impl Drop for FleetWatch {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

fn watch_objects<K>(
    edge: Edge,
    kind: Object,
    client: &Client,
    expected_state: &Arc<ExpectedState>,
) -> JoinHandle<()>
where
    K: Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + 'static,
{
    let api: Api<K> = Api::all(client.clone());
    let expected_state = Arc::clone(expected_state);
    tokio::spawn(async move {
        let config = Config::default().labels("app.kubernetes.io/managed-by=Helm");
        let mut events = watcher(api, config).boxed();
        let mut listed = BTreeSet::new();
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => listed.clear(),
                Ok(Event::InitApply(object)) => {
                    listed.insert(object_key(&object));
                    record_object(&expected_state, edge, kind, &object);
                }
                Ok(Event::InitDone) => expected_state.record_list(edge, kind, &listed),
                Ok(Event::Apply(object)) => record_object(&expected_state, edge, kind, &object),
                Ok(Event::Delete(object)) => {
                    expected_state.record_deletion(edge, kind, &object_key(&object))
                }
                // The API server is down.
                Err(_) => tokio::time::sleep(RETRY_PAUSE).await,
            }
        }
    })
}

fn watch_epochs<K>(
    epoch_of: fn(&K) -> Option<u64>,
    client: &Client,
    expected_state: &Arc<ExpectedState>,
) -> JoinHandle<()>
where
    K: Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + 'static,
{
    let api: Api<K> = Api::all(client.clone());
    let expected_state = Arc::clone(expected_state);
    tokio::spawn(async move {
        let mut events = watcher(api, Config::default()).boxed();
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::InitApply(object) | Event::Apply(object)) => {
                    if let Some(epoch) = epoch_of(&object) {
                        let what = format!("{} {}", K::kind(&()), object.name_any());
                        expected_state.record_write(
                            &what,
                            &object.uid().unwrap_or_default(),
                            epoch,
                        );
                    }
                }
                Ok(_) => {}
                Err(_) => tokio::time::sleep(RETRY_PAUSE).await,
            }
        }
    })
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
        expected_state.record_object(edge, kind, &object_key(object), release, &uid);
    }
}

fn object_key<K: Resource<DynamicType = ()>>(object: &K) -> ObjectKey {
    (object.namespace().unwrap_or_default(), object.name_any())
}

//! Who watches all objects of the chart on one edge, without a pause, at the apiserver itself.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures::StreamExt;
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{ConfigMap, Service},
};
use kube::{
    Api, Client, Resource, ResourceExt,
    runtime::watcher::{Config, Event, watcher},
};
use tokio::task::JoinHandle;

use super::{
    fault::{Edge, Object},
    ledger::Ledger,
    snapshot::Place,
};

const PAUSE: Duration = Duration::from_millis(300);
const RELEASE_ANNOTATION: &str = "meta.helm.sh/release-name";

/// Watches until it is dropped.
#[derive(Debug)]
pub(crate) struct Witness(Vec<JoinHandle<()>>);

impl Witness {
    pub(crate) fn start(edge: Edge, client: &Client, ledger: &Arc<Ledger>) -> Self {
        Self(vec![
            watch::<ConfigMap>(edge, Object::ConfigMap, client, ledger),
            watch::<Service>(edge, Object::Service, client, ledger),
            watch::<Deployment>(edge, Object::Deployment, client, ledger),
        ])
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

fn watch<K>(edge: Edge, kind: Object, client: &Client, ledger: &Arc<Ledger>) -> JoinHandle<()>
where
    K: Resource<DynamicType = ()>
        + Clone
        + std::fmt::Debug
        + serde::de::DeserializeOwned
        + Send
        + 'static,
{
    let api: Api<K> = Api::all(client.clone());
    let ledger = Arc::clone(ledger);
    tokio::spawn(async move {
        let config = Config::default().labels("app.kubernetes.io/managed-by=Helm");
        let mut events = watcher(api, config).boxed();
        let mut listed = BTreeSet::new();
        while let Some(event) = events.next().await {
            match event {
                Ok(Event::Init) => listed.clear(),
                Ok(Event::InitApply(object)) => {
                    listed.insert(place(&object));
                    there(&ledger, edge, kind, &object);
                }
                Ok(Event::InitDone) => ledger.only(edge, kind, &listed),
                Ok(Event::Apply(object)) => there(&ledger, edge, kind, &object),
                Ok(Event::Delete(object)) => ledger.gone(edge, kind, &place(&object)),
                // The apiserver is away.
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    })
}

fn there<K: Resource<DynamicType = ()>>(ledger: &Ledger, edge: Edge, kind: Object, object: &K) {
    let release = object.annotations().get(RELEASE_ANNOTATION);
    if let Some(release) = release.filter(|release| release.starts_with("tenant-")) {
        let uid = object.uid().unwrap_or_default();
        ledger.there(edge, kind, &place(object), release, &uid);
    }
}

fn place<K: Resource<DynamicType = ()>>(object: &K) -> Place {
    (object.namespace().unwrap_or_default(), object.name_any())
}

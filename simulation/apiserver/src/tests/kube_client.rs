//! Tests with kube's client and watcher.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{Stream, StreamExt as _, pin_mut};
use http::{Request, Response};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::client::{Body, Client};
use kube::core::{ApiResource, GroupVersionKind};
use kube::runtime::watcher::{self, Event, watcher};
use serde_json::json;

use crate::server::Answer;

use super::Fixture;

type Shared = Arc<Mutex<Fixture>>;

/// Answers a request. A watch ends after its next events.
async fn respond(shared: Shared, request: Request<Body>) -> Result<Response<Body>, kube::Error> {
    let (head, body) = request.into_parts();
    let request = Request::from_parts(head, body.collect_bytes().await?);
    let answer = {
        let mut all = shared.lock().unwrap();
        let now = all.now;
        all.server.handle(now, &request)
    };
    let (head, id) = match answer {
        Answer::Complete(response) => {
            return Ok(response.map(|bytes| Body::from(bytes.to_vec())));
        }
        Answer::Watch(head, id) => (head, id),
    };
    for _ in 0..3000 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let mut all = shared.lock().unwrap();
        all.now += Duration::from_millis(100);
        let now = all.now;
        all.server.advance(now);
        let events = all.server.take_events(id);
        if events.ended || !events.lines.is_empty() {
            all.server.close_watch(id);
            let lines: Vec<u8> = events.lines.concat();
            return Ok(head.map(|()| Body::from(lines)));
        }
    }
    panic!("the watch has no events");
}

fn client(shared: &Shared) -> Client {
    let shared = shared.clone();
    let service = tower::service_fn(move |request| respond(shared.clone(), request));
    Client::new(service, "default")
}

fn shared() -> Shared {
    Arc::new(Mutex::new(Fixture::new()))
}

async fn next<K, S>(stream: &mut S) -> String
where
    S: Stream<Item = Result<Event<K>, watcher::Error>> + Unpin,
    K: kube::Resource,
{
    loop {
        let event = stream.next().await.unwrap().unwrap();
        let (kind, object) = match event {
            Event::Apply(object) => ("apply", object),
            Event::InitApply(object) => ("init", object),
            Event::Delete(object) => ("delete", object),
            Event::Init => continue,
            Event::InitDone => return "done".to_owned(),
        };
        return format!("{kind} {}", object.meta().name.clone().unwrap_or_default());
    }
}

#[tokio::test(start_paused = true)]
async fn kube_watcher_sees_every_change() {
    let shared = shared();
    let client = client(&shared);
    let maps: Api<ConfigMap> = Api::namespaced(client, "default");
    let map = |name: &str| serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
    maps.create(&PostParams::default(), &map("a"))
        .await
        .unwrap();
    for streams in ["no", "yes"] {
        let config = match streams {
            "no" => watcher::Config::default(),
            _ => watcher::Config::default().streaming_lists(),
        };
        let events = watcher(
            maps.clone(),
            config.fields("metadata.name!=kube-root-ca.crt"),
        );
        pin_mut!(events);
        assert_eq!(next(&mut events).await, "init a");
        assert_eq!(next(&mut events).await, "done");
        maps.create(&PostParams::default(), &map("b"))
            .await
            .unwrap();
        assert_eq!(next(&mut events).await, "apply b");
        let patch = Patch::Merge(json!({"data": {"streams": streams}}));
        maps.patch("a", &PatchParams::default(), &patch)
            .await
            .unwrap();
        assert_eq!(next(&mut events).await, "apply a");
        shared.lock().unwrap().server.compact();
        maps.delete("b", &DeleteParams::default()).await.unwrap();
        assert_eq!(next(&mut events).await, "delete b");
    }
}

#[tokio::test(start_paused = true)]
async fn product_crd_is_served_and_deleted() {
    let shared = shared();
    let client = client(&shared);
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    let mut all = krypton_crds::all().into_iter();
    let wanted = all.find(|crd| crd.spec.names.kind == "Tenant").unwrap();
    let name = wanted.metadata.name.clone().unwrap();
    let params = PatchParams::apply("krypton").force();
    crds.patch(&name, &params, &Patch::Apply(&wanted))
        .await
        .unwrap();
    let pass = |seconds| shared.lock().unwrap().pass(seconds);
    pass(1);
    let again = crds
        .patch(&name, &params, &Patch::Apply(&wanted))
        .await
        .unwrap();
    assert_eq!(again.metadata.generation, Some(1));
    let version = wanted.spec.versions[0].name.clone();
    let kind = GroupVersionKind::gvk(&wanted.spec.group, &version, &wanted.spec.names.kind);
    let resource = ApiResource::from_gvk_with_plural(&kind, &wanted.spec.names.plural);
    let tenants: Api<DynamicObject> = Api::namespaced_with(client.clone(), "default", &resource);
    let tenant = json!({
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {"name": "acme", "finalizers": ["krypton/test"]},
        "spec": {"account": "a", "region": "b", "workspace": "acme"},
    });
    let tenant: DynamicObject = serde_json::from_value(tenant).unwrap();
    let made = tenants
        .create(&PostParams::default(), &tenant)
        .await
        .unwrap();
    assert_eq!(made.metadata.generation, Some(1));
    let status = json!({"status": {"observedGeneration": 1}});
    let patched = tenants
        .patch_status("acme", &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    assert_eq!(patched.metadata.generation, Some(1));
    crds.delete(&name, &DeleteParams::default()).await.unwrap();
    pass(2);
    let waiting = tenants.get("acme").await.unwrap();
    assert!(waiting.metadata.deletion_timestamp.is_some());
    let release = json!({"metadata": {"finalizers": null}});
    tenants
        .patch("acme", &PatchParams::default(), &Patch::Merge(release))
        .await
        .unwrap();
    pass(2);
    assert!(crds.get_opt(&name).await.unwrap().is_none());
    assert!(tenants.list(&Default::default()).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn discovery_lists_kinds_for_kube() {
    let shared = shared();
    let client = client(&shared);
    let groups = client.list_api_groups_aggregated().await.unwrap();
    assert!(groups.items.iter().any(|group| {
        group
            .metadata
            .as_ref()
            .and_then(|metadata| metadata.name.as_deref())
            == Some("apps")
    }));
    assert_eq!(client.apiserver_version().await.unwrap().minor, "33");
    let namespaces: Api<Namespace> = Api::all(client);
    let found = namespaces.get_metadata("kube-system").await.unwrap();
    assert!(found.metadata.uid.is_some());
}

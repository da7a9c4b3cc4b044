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
    let response = {
        let mut fixture = shared.lock().unwrap();
        let now = fixture.now;
        fixture.server.handle(now, &request)
    };
    let (head, watch) = match response {
        Answer::Complete(response) => {
            return Ok(response.map(|bytes| Body::from(bytes.to_vec())));
        }
        Answer::Watch(head, watch) => (head, watch),
    };
    for _ in 0..3000 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let mut fixture = shared.lock().unwrap();
        fixture.now += Duration::from_millis(100);
        let now = fixture.now;
        fixture.server.advance(now);
        let events = fixture.server.take_events(watch);
        if events.ended || !events.lines.is_empty() {
            fixture.server.close_watch(watch);
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

async fn next_event<K, S>(stream: &mut S) -> String
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
    let config_maps: Api<ConfigMap> = Api::namespaced(client, "default");
    let config_map =
        |name: &str| serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
    config_maps
        .create(&PostParams::default(), &config_map("a"))
        .await
        .unwrap();
    for streams in ["no", "yes"] {
        let config = match streams {
            "no" => watcher::Config::default(),
            _ => watcher::Config::default().streaming_lists(),
        };
        let events = watcher(
            config_maps.clone(),
            config.fields("metadata.name!=kube-root-ca.crt"),
        );
        pin_mut!(events);
        assert_eq!(next_event(&mut events).await, "init a");
        assert_eq!(next_event(&mut events).await, "done");
        config_maps
            .create(&PostParams::default(), &config_map("b"))
            .await
            .unwrap();
        assert_eq!(next_event(&mut events).await, "apply b");
        let patch = Patch::Merge(json!({"data": {"streams": streams}}));
        config_maps
            .patch("a", &PatchParams::default(), &patch)
            .await
            .unwrap();
        assert_eq!(next_event(&mut events).await, "apply a");
        shared.lock().unwrap().server.compact();
        config_maps
            .delete("b", &DeleteParams::default())
            .await
            .unwrap();
        assert_eq!(next_event(&mut events).await, "delete b");
    }
}

#[tokio::test(start_paused = true)]
async fn product_crd_is_served_and_deleted() {
    let shared = shared();
    let client = client(&shared);
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    let mut all = krypton_crds::all().into_iter();
    let crd = all.find(|crd| crd.spec.names.kind == "Tenant").unwrap();
    let name = crd.metadata.name.clone().unwrap();
    let params = PatchParams::apply("krypton").force();
    crds.patch(&name, &params, &Patch::Apply(&crd))
        .await
        .unwrap();
    let advance = |seconds| shared.lock().unwrap().advance(seconds);
    advance(1);
    let reapplied = crds
        .patch(&name, &params, &Patch::Apply(&crd))
        .await
        .unwrap();
    assert_eq!(reapplied.metadata.generation, Some(1));
    let version = crd.spec.versions[0].name.clone();
    let kind = GroupVersionKind::gvk(&crd.spec.group, &version, &crd.spec.names.kind);
    let resource = ApiResource::from_gvk_with_plural(&kind, &crd.spec.names.plural);
    let tenants: Api<DynamicObject> = Api::namespaced_with(client.clone(), "default", &resource);
    let tenant = json!({
        "apiVersion": resource.api_version,
        "kind": resource.kind,
        "metadata": {"name": "acme", "finalizers": ["krypton/test"]},
        "spec": {"account": "a", "region": "b", "workspace": "acme"},
    });
    let tenant: DynamicObject = serde_json::from_value(tenant).unwrap();
    let created = tenants
        .create(&PostParams::default(), &tenant)
        .await
        .unwrap();
    assert_eq!(created.metadata.generation, Some(1));
    let status = json!({"status": {"observedGeneration": 1}});
    let patched = tenants
        .patch_status("acme", &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
    assert_eq!(patched.metadata.generation, Some(1));
    crds.delete(&name, &DeleteParams::default()).await.unwrap();
    advance(2);
    let terminating = tenants.get("acme").await.unwrap();
    assert!(terminating.metadata.deletion_timestamp.is_some());
    let finalizer_removal = json!({"metadata": {"finalizers": null}});
    tenants
        .patch(
            "acme",
            &PatchParams::default(),
            &Patch::Merge(finalizer_removal),
        )
        .await
        .unwrap();
    advance(2);
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
    let kube_system = namespaces.get_metadata("kube-system").await.unwrap();
    assert!(kube_system.metadata.uid.is_some());
}

//! Tests with kube's client and watcher. The conformance table has the answers to single requests.

use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt as _, pin_mut};
use http::{Request, Response};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{
    Api, DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams,
};
use kube::client::{Body, Client};
use kube::runtime::watcher::{self, Event, watcher};
use parking_lot::Mutex;
use serde_json::json;

use crate::server::{Answer, ApiServer, Options};

struct ClockedServer {
    server: ApiServer,
    now: Timestamp,
}

type Shared = Arc<Mutex<ClockedServer>>;

fn shared() -> Shared {
    let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
    let options = Options {
        name: "test".to_owned(),
        version: "v1.33.5".to_owned(),
        crd_delay: Duration::from_millis(300),
        controller_delay: Duration::from_millis(100),
    };
    let server = ApiServer::new(options, now);
    Arc::new(Mutex::new(ClockedServer { server, now }))
}

/// Answers a request. A watch ends after its next events.
async fn respond(shared: Shared, request: Request<Body>) -> Result<Response<Body>, kube::Error> {
    let (head, body) = request.into_parts();
    let request = Request::from_parts(head, body.collect_bytes().await?);
    let response = {
        let mut clocked = shared.lock();
        let now = clocked.now;
        clocked.server.handle(now, &request)
    };
    let (head, watch) = match response {
        Answer::Complete(response) => {
            return Ok(response.map(|bytes| Body::from(bytes.to_vec())));
        }
        Answer::Watch(head, watch) => (head, watch),
    };
    for _ in 0..3000 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let mut clocked = shared.lock();
        clocked.now += Duration::from_millis(100);
        let now = clocked.now;
        clocked.server.advance(now);
        let events = clocked.server.take_events(watch);
        if events.ended || !events.lines.is_empty() {
            clocked.server.close_watch(watch);
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

async fn create(config_maps: &Api<ConfigMap>, name: &str) {
    let config_map = serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
    let params = PostParams::default();
    config_maps.create(&params, &config_map).await.unwrap();
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
    let config_maps: Api<ConfigMap> = Api::namespaced(client(&shared), "default");
    create(&config_maps, "a").await;
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
        create(&config_maps, "b").await;
        assert_eq!(next_event(&mut events).await, "apply b");
        let patch = Patch::Merge(json!({"data": {"streams": streams}}));
        config_maps
            .patch("a", &PatchParams::default(), &patch)
            .await
            .unwrap();
        assert_eq!(next_event(&mut events).await, "apply a");
        shared.lock().server.compact();
        config_maps
            .delete("b", &DeleteParams::default())
            .await
            .unwrap();
        assert_eq!(next_event(&mut events).await, "delete b");
    }
}

#[tokio::test(start_paused = true)]
async fn compaction_ends_pages_and_watches() {
    let shared = shared();
    let config_maps: Api<ConfigMap> = Api::namespaced(client(&shared), "default");
    for name in ["a", "b"] {
        create(&config_maps, name).await;
    }
    let page = ListParams::default().limit(1);
    let first = config_maps.list(&page).await.unwrap();
    let rest = page.continue_token(&first.metadata.continue_.unwrap());
    create(&config_maps, "c").await;
    let second = config_maps.list(&rest).await.unwrap().items;
    let names: Vec<_> = second
        .iter()
        .map(|map| map.metadata.name.as_deref())
        .collect();
    assert_eq!(names, [Some("b")]);

    shared.lock().server.compact();

    let expired = config_maps.list(&rest).await.unwrap_err();
    let is_expired = |code: u16, reason: &str| (code, reason) == (410, "Expired");
    assert!(
        matches!(&expired, kube::Error::Api(status) if is_expired(status.code, &status.reason)),
        "{expired:?}"
    );
    let params = WatchParams::default();
    let events = config_maps.watch(&params, "1").await.unwrap();
    pin_mut!(events);
    let event = events.next().await.unwrap().unwrap();
    assert!(
        matches!(&event, WatchEvent::Error(status) if is_expired(status.code, &status.reason)),
        "{event:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn watch_gets_bookmark_after_a_minute() {
    let shared = shared();
    let client = client(&shared);
    let version = client.apiserver_version().await.unwrap();
    assert_eq!(version.minor, "33");
    let config_maps: Api<ConfigMap> = Api::namespaced(client, "default");
    let list = config_maps.list(&ListParams::default()).await.unwrap();
    let started = shared.lock().now;
    let params = WatchParams::default().fields("metadata.name!=kube-root-ca.crt");
    let version = list.metadata.resource_version.unwrap();
    let events = config_maps.watch(&params, &version).await.unwrap();
    pin_mut!(events);
    let event = events.next().await.unwrap().unwrap();
    assert!(matches!(event, WatchEvent::Bookmark(_)), "{event:?}");
    let waited = shared.lock().now.duration_since(started);
    assert_eq!(waited.as_secs(), 60);
}

#[test]
fn moved_clock_delays_no_controller() {
    let shared = shared();
    let mut clocked = shared.lock();
    let timer = clocked.server.next_timer().unwrap();
    let by = SignedDuration::from_secs(-60);
    clocked.server.move_clock(by);
    assert_eq!(clocked.server.next_timer(), Some(timer + by));
}

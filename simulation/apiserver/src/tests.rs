//! Tests of the whole server through requests.

use std::time::Duration;

use bytes::Bytes;
use http::Request;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::server::{Answer, ApiServer, Options, WatchId};

mod kube_client;

struct Fixture {
    server: ApiServer,
    now: Timestamp,
}

impl Fixture {
    fn new() -> Self {
        let now: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let options = Options {
            name: "test".to_owned(),
            version: "v1.33.5".to_owned(),
            crd_delay: Duration::from_millis(300),
            controller_delay: Duration::from_millis(100),
        };
        let server = ApiServer::new(options, now);
        Self { server, now }
    }

    fn advance(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        self.server.advance(self.now);
    }

    fn request(
        &self,
        call: &str,
        content_type: &str,
        accept: &str,
        body: &Value,
    ) -> Request<Bytes> {
        let (method, path) = call.split_once(' ').unwrap();
        let body = match body {
            Value::Null => Bytes::new(),
            body => body.to_string().into(),
        };
        let request = Request::builder().method(method).uri(path);
        let request = request
            .header("content-type", content_type)
            .header("accept", accept);
        request.header("user-agent", "tester/1").body(body).unwrap()
    }

    fn send(&mut self, request: &Request<Bytes>) -> (u16, Value) {
        match self.server.handle(self.now, request) {
            Answer::Complete(response) => {
                let body = serde_json::from_slice(response.body()).unwrap_or_else(|_| {
                    String::from_utf8_lossy(response.body()).into_owned().into()
                });
                (response.status().as_u16(), body)
            }
            Answer::Watch(..) => panic!("a watch"),
        }
    }

    fn call(&mut self, call: &str, body: Value) -> (u16, Value) {
        let content_type = match call.starts_with("PATCH") {
            true => "application/merge-patch+json",
            false => "application/json",
        };
        let request = self.request(call, content_type, "application/json", &body);
        self.send(&request)
    }

    fn ok(&mut self, call: &str, body: Value) -> Value {
        let (code, body) = self.call(call, body);
        assert!(code < 300, "{call}: {code} {body}");
        body
    }

    fn watch(&mut self, path: &str) -> WatchId {
        let request = self.request(&format!("GET {path}"), "", "", &Value::Null);
        match self.server.handle(self.now, &request) {
            Answer::Watch(_, id) => id,
            Answer::Complete(response) => panic!("{response:?}"),
        }
    }

    fn events(&mut self, id: WatchId) -> Vec<(String, String)> {
        let events = self.server.take_events(id);
        let events = events.lines.iter().map(|line| {
            let event: Value = serde_json::from_slice(line).unwrap();
            let name = event["object"]["metadata"]["name"].as_str();
            let kind = event["type"].as_str().unwrap().to_owned();
            (kind, name.unwrap_or_default().to_owned())
        });
        events.collect()
    }
}

fn config_map(name: &str, value: &str) -> Value {
    json!({"metadata": {"name": name, "labels": {"app": value}}, "data": {"key": value}})
}

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

#[test]
fn objects_are_created_read_replaced_and_deleted() {
    let mut fixture = Fixture::new();
    let created = fixture.ok(&format!("POST {MAPS}"), config_map("a", "1"));
    assert_eq!(created["kind"], "ConfigMap");
    let path = format!("{MAPS}/a");
    assert_eq!(fixture.ok(&format!("GET {path}"), Value::Null), created);
    let (code, body) = fixture.call(&format!("POST {MAPS}"), config_map("a", "1"));
    assert_eq!((code, &body["reason"]), (409, &json!("AlreadyExists")));
    let mut next = created.clone();
    next["data"]["key"] = "2".into();
    let replaced = fixture.ok(&format!("PUT {path}"), next.clone());
    assert_eq!(replaced["metadata"]["uid"], created["metadata"]["uid"]);
    let (code, body) = fixture.call(&format!("PUT {path}"), next);
    assert_eq!((code, &body["reason"]), (409, &json!("Conflict")));
    let same = fixture.ok(&format!("PATCH {path}"), json!({"data": {"key": "2"}}));
    assert_eq!(same, replaced);
    let patched = fixture.ok(
        &format!("PATCH {path}"),
        json!({"metadata": {"finalizers": ["a/b"]}}),
    );
    assert_ne!(
        patched["metadata"]["resourceVersion"],
        same["metadata"]["resourceVersion"]
    );
    let deleting = fixture.ok(&format!("DELETE {path}"), Value::Null);
    assert_eq!(deleting["metadata"]["deletionGracePeriodSeconds"], 0);
    fixture.ok(
        &format!("PATCH {path}"),
        json!({"metadata": {"finalizers": null}}),
    );
    let (code, body) = fixture.call(&format!("GET {path}"), Value::Null);
    assert_eq!(
        (code, &body["message"]),
        (404, &json!("configmaps \"a\" not found"))
    );
}

#[test]
fn watches_report_changes_in_order() {
    let mut fixture = Fixture::new();
    fixture.ok(&format!("POST {MAPS}"), config_map("a", "1"));
    let all_events = fixture.watch("/api/v1/configmaps?watch=true&allowWatchBookmarks=true");
    let labelled_events = fixture.watch(&format!("{MAPS}?watch=1&labelSelector=app%3D1"));
    fixture.ok(
        &format!("PATCH {MAPS}/a"),
        json!({"metadata": {"labels": {"app": "2"}}}),
    );
    fixture.ok(&format!("DELETE {MAPS}/a"), Value::Null);
    let event = |kind: &str| (kind.to_owned(), "a".to_owned());
    let expected = [event("ADDED"), event("MODIFIED"), event("DELETED")];
    let mut events = fixture.events(all_events);
    events.retain(|(kind, _)| kind != "BOOKMARK");
    assert_eq!(events, expected);
    assert_eq!(
        fixture.events(labelled_events),
        [event("ADDED"), event("DELETED")]
    );
    fixture.advance(61);
    assert!(
        fixture
            .events(all_events)
            .iter()
            .any(|(kind, _)| kind == "BOOKMARK")
    );
    fixture.server.compact();
    let old = fixture.watch("/api/v1/configmaps?watch=true&resourceVersion=1");
    assert_eq!(fixture.events(old), [("ERROR".to_owned(), String::new())]);
}

#[test]
fn lists_have_pages_of_one_revision() {
    let mut fixture = Fixture::new();
    for name in ["a", "b", "c"] {
        fixture.ok(&format!("POST {MAPS}"), config_map(name, "1"));
    }
    let names = |list: &Value| -> Vec<String> {
        let items = list["items"].as_array().unwrap().iter();
        items
            .map(|item| item["metadata"]["name"].as_str().unwrap().to_owned())
            .collect()
    };
    let first = fixture.ok(&format!("GET {MAPS}?limit=2"), Value::Null);
    assert_eq!(names(&first), ["a", "b"]);
    assert_eq!(first["metadata"]["remainingItemCount"], 1);
    fixture.ok(&format!("DELETE {MAPS}/c"), Value::Null);
    let token = first["metadata"]["continue"].as_str().unwrap();
    let rest = format!("GET {MAPS}?limit=2&continue={token}");
    let second = fixture.ok(&rest, Value::Null);
    assert_eq!(names(&second), ["c"]);
    assert_eq!(
        second["metadata"]["resourceVersion"],
        first["metadata"]["resourceVersion"]
    );
    fixture.server.compact();
    let (code, body) = fixture.call(&rest, Value::Null);
    assert_eq!((code, &body["reason"]), (410, &json!("Expired")));
    assert_eq!(
        names(&fixture.ok(&format!("GET {MAPS}"), Value::Null)),
        ["a", "b"]
    );
}

//! Tests against an API server with one object, whose responses each test defines.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use http::{Method, Request as HttpRequest, Response, StatusCode};
use kube::client::Body;
use serde_json::json;

use super::*;
use crate::drift::ignore;

type Answers = dyn Fn(&Asked) -> (u16, Value) + Send + Sync;

/// A received request.
#[derive(Clone, Debug)]
struct Asked {
    method: Method,
    path: String,
    query: String,
    body: Value,
    /// Number of earlier requests with this method.
    before: usize,
}

/// A server with a log of its requests.
#[derive(Clone)]
struct Server {
    client: Client,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Server {
    fn start(answers: Arc<Answers>) -> Self {
        let asked: Arc<Mutex<Vec<Asked>>> = Arc::default();
        let log = Arc::clone(&asked);
        let service = tower::service_fn(move |request: HttpRequest<Body>| {
            let (answers, log) = (Arc::clone(&answers), Arc::clone(&log));
            async move {
                let (parts, body) = request.into_parts();
                let body = body.collect_bytes().await.unwrap_or_default();
                let mut seen = Asked {
                    method: parts.method,
                    path: parts.uri.path().to_owned(),
                    query: parts.uri.query().unwrap_or_default().to_owned(),
                    body: serde_json::from_slice(&body).unwrap_or_default(),
                    before: 0,
                };
                let (code, answer) = {
                    let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
                    let same = log.iter().filter(|other| other.method == seen.method);
                    seen.before = same.count();
                    log.push(seen.clone());
                    answers(&seen)
                };
                let answer = match code {
                    200 => answer,
                    code => json!({"kind": "Status", "apiVersion": "v1", "status": "Failure",
                        "code": code, "message": answer, "reason": "Test"}),
                };
                let mut response = Response::new(Body::from(answer.to_string().into_bytes()));
                *response.status_mut() = StatusCode::from_u16(code).unwrap_or_default();
                Ok::<_, Infallible>(response)
            }
        });
        Self {
            client: Client::new(service, "default"),
            asked,
        }
    }

    fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    fn writes(&self) -> Vec<Asked> {
        let dry = |seen: &Asked| seen.query.contains("dryRun=All");
        let mut asked = self.asked();
        asked.retain(|seen| seen.method == Method::PATCH && !dry(seen));
        asked
    }
}

fn manifest(message: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "web"}, "data": {"message": message}})
}

fn live(message: &str) -> Value {
    let mut live = object::applied(&manifest(message), &release());
    live["metadata"]["uid"] = json!("uid-1");
    live["metadata"]["resourceVersion"] = json!("7");
    live["metadata"]["managedFields"] = json!([{"manager": "kubectl-edit", "operation": "Update",
        "fieldsV1": {"f:data": {"f:message": {}}}}]);
    live
}

pub(super) fn release() -> ReleaseKey {
    ReleaseKey {
        namespace: "acme".to_owned(),
        name: "web".to_owned(),
    }
}

/// Returns a server with or without this object. An apply returns the object with the manifest's data.
fn server(live: Option<Value>) -> Server {
    Server::start(Arc::new(move |seen| match (&seen.method, &live) {
        _ if seen.path == "/api/v1" => kinds(),
        (&Method::PATCH, _) => {
            let mut after = live.clone().unwrap_or_else(|| seen.body.clone());
            after["data"] = seen.body["data"].clone();
            (200, after)
        }
        (_, Some(live)) => (200, live.clone()),
        (_, None) => (404, json!("not found")),
    }))
}

fn kinds() -> (u16, Value) {
    let kind = json!({"name": "configmaps", "singularName": "", "kind": "ConfigMap", "namespaced": true, "verbs": []});
    let wide = json!({"name": "namespaces", "singularName": "", "kind": "Namespace", "namespaced": false, "verbs": []});
    (
        200,
        json!({"groupVersion": "v1", "resources": [kind, wide]}),
    )
}

struct Looks {
    server: Server,
    notes: Notes,
    wanted: Wanted,
    may_write: bool,
    adopted: bool,
    recorded: bool,
    cancel: CancellationToken,
}

impl Looks {
    pub(crate) fn at(server: Server, mode: DriftMode) -> Self {
        let wanted = Wanted {
            mode,
            interval_seconds: 600,
            ..Wanted::default()
        };
        Self {
            server,
            notes: Notes::default(),
            wanted,
            may_write: true,
            adopted: false,
            recorded: true,
            cancel: CancellationToken::new(),
        }
    }

    async fn look(&mut self, manifest: &Value) -> Result<Seen, LookError> {
        let (release, metrics) = (release(), DriftMetrics::default());
        let task = Task {
            client: &self.server.client,
            release: &release,
            revision: 1,
            wanted: &self.wanted,
            metrics: &metrics,
            cancel: &self.cancel,
            adopted: self.adopted,
            recorded: self.recorded,
            may_write: &|| self.may_write,
        };
        look(&task, &mut self.notes, std::slice::from_ref(manifest)).await
    }
}

fn outcomes(seen: &Seen) -> Vec<&Outcome> {
    seen.findings
        .iter()
        .map(|finding| &finding.outcome)
        .collect()
}

#[tokio::test(start_paused = true)]
async fn matching_object_is_compared_again_only_after_change() {
    let mut looks = Looks::at(server(Some(live("hello"))), DriftMode::Heal);
    for _ in 0..3 {
        let seen = looks.look(&manifest("hello")).await.unwrap();
        assert_eq!((seen.findings.len(), seen.unseen.len()), (0, 0));
    }
    let asked = looks.server.asked();
    let count = |method: &Method| asked.iter().filter(|seen| seen.method == *method).count();
    assert_eq!(count(&Method::PATCH), 1, "{asked:?}");
    assert_eq!(
        count(&Method::GET),
        1 + 3,
        "the kinds once, the object at each look"
    );
    // Changed rules invalidate the previous result.
    looks.wanted.rules = ignore::read("/data/x").0;
    looks.look(&manifest("hello")).await.unwrap();
    let asked = looks.server.asked();
    assert_eq!(asked.last().unwrap().method, Method::PATCH);
    assert!(looks.server.writes().is_empty());
}

#[tokio::test(start_paused = true)]
async fn drift_is_corrected_as_helm_only_when_allowed() {
    let mut looks = Looks::at(server(Some(live("edited"))), DriftMode::Warn);
    let seen = looks.look(&manifest("hello")).await.unwrap();
    assert_eq!(outcomes(&seen), [&Outcome::Left]);
    assert_eq!(seen.findings[0].writer.as_deref(), Some("kubectl-edit"));
    assert!(looks.server.writes().is_empty());
    looks.wanted.mode = DriftMode::Heal;
    looks.may_write = false;
    let error = looks.look(&manifest("hello")).await.unwrap_err();
    assert!(matches!(error, LookError::CalledOff) && looks.server.writes().is_empty());
    looks.may_write = true;
    let seen = looks.look(&manifest("hello")).await.unwrap();
    assert_eq!(outcomes(&seen), [&Outcome::Healed]);
    let writes = looks.server.writes();
    let [write] = writes.as_slice() else {
        panic!("{writes:?}")
    };
    assert_eq!(write.path, "/api/v1/namespaces/acme/configmaps/web");
    assert!(write.query.contains("fieldManager=helm") && write.query.contains("force=true"));
    assert_eq!(write.body["metadata"]["uid"], "uid-1");
    assert_eq!(write.body["metadata"]["resourceVersion"], "7");
}

#[tokio::test(start_paused = true)]
async fn deleted_object_is_recreated_without_forcing_ownership() {
    let mut looks = Looks::at(server(None), DriftMode::Heal);
    let seen = looks.look(&manifest("hello")).await.unwrap();
    assert_eq!(seen.findings[0].difference, Difference::Deleted);
    assert_eq!(outcomes(&seen), [&Outcome::Healed]);
    let writes = looks.server.writes();
    assert_eq!(writes.len(), 1);
    assert!(!writes[0].query.contains("force"), "{}", writes[0].query);
}

#[tokio::test]
async fn missing_job_is_not_recreated() {
    let server = Server::start(Arc::new(|seen| match seen.path.as_str() {
        "/apis/batch/v1" => {
            let kind = json!({"name": "jobs", "singularName": "", "kind": "Job", "namespaced": true, "verbs": []});
            (
                200,
                json!({"groupVersion": "batch/v1", "resources": [kind]}),
            )
        }
        _ => (404, json!("not found")),
    }));
    let mut looks = Looks::at(server, DriftMode::Heal);
    let job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "once"}});
    let seen = looks.look(&job).await.unwrap();
    let asked = looks.server.asked();
    assert!(
        asked.iter().any(|seen| seen.path.ends_with("/jobs/once")),
        "{asked:?}"
    );
    assert!(
        seen.findings.is_empty() && seen.unseen.is_empty(),
        "{seen:?}"
    );
    assert!(
        asked.iter().all(|seen| seen.method == Method::GET),
        "{asked:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn recurring_drift_is_held_back_after_three_corrections() {
    let mut looks = Looks::at(server(Some(live("edited"))), DriftMode::Heal);
    let mut all = Vec::new();
    for _ in 0..5 {
        let seen = looks.look(&manifest("hello")).await.unwrap();
        all.extend(outcomes(&seen).into_iter().cloned());
    }
    let [healed, held] = [Outcome::Healed, Outcome::HeldBack];
    assert_eq!(
        all,
        [healed.clone(), healed.clone(), healed, held.clone(), held]
    );
    assert_eq!(looks.server.writes().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn foreign_excluded_or_terminating_object_is_never_written() {
    let marked = |key: &str, value: &str| {
        let mut live = live("edited");
        live["metadata"]["annotations"][key] = json!(value);
        live
    };
    let theirs = marked("meta.helm.sh/release-name", "other");
    let mut looks = Looks::at(server(Some(theirs)), DriftMode::Heal);
    let seen = looks.look(&manifest("hello")).await.unwrap();
    assert_eq!(
        outcomes(&seen),
        [&Outcome::NotOurs("acme/other".to_owned())]
    );
    let mut going = live("edited");
    going["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    for object in [marked(DRIFT_ANNOTATION, "off"), going] {
        let mut aside = Looks::at(server(Some(object)), DriftMode::Heal);
        let seen = aside.look(&manifest("hello")).await.unwrap();
        assert_eq!(seen.findings, []);
        assert!(aside.server.writes().is_empty());
    }
    assert!(looks.server.writes().is_empty());
}

#[tokio::test(start_paused = true)]
async fn uncomparable_object_is_reported_unhealthy_apiserver_aborts_check() {
    let of = |at: Method, code: u16| {
        Server::start(Arc::new(move |seen: &Asked| match seen.path.as_str() {
            "/api/v1" => kinds(),
            _ if seen.method == at => (code, json!("the reason")),
            _ => (200, live("hello")),
        }))
    };
    for (at, code) in [
        (Method::GET, 403),
        (Method::PATCH, 403),
        (Method::PATCH, 400),
        (Method::PATCH, 422),
        (Method::PATCH, 500),
    ] {
        let mut looks = Looks::at(of(at.clone(), code), DriftMode::Heal);
        let seen = looks.look(&manifest("hello")).await.unwrap();
        assert_eq!(seen.findings, [], "{at} {code}");
        assert_eq!(seen.unseen[0].1, "the reason", "{at} {code}");
        assert!(looks.server.writes().is_empty());
    }
    for code in [401, 429, 503, 504] {
        let mut looks = Looks::at(of(Method::GET, code), DriftMode::Heal);
        let error = looks.look(&manifest("hello")).await.unwrap_err();
        assert!(matches!(error, LookError::Api(_)), "{code}");
    }
    // A check queries an unserved kind only once.
    let mut looks = Looks::at(server(None), DriftMode::Heal);
    let gone = json!({"apiVersion": "v1", "kind": "Widget", "metadata": {"name": "a"}});
    let seen = looks.look(&gone).await.unwrap();
    assert!(seen.unseen[0].1.contains("no kind Widget"), "{seen:?}");
    assert_eq!(looks.server.asked().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn conflicting_write_is_retried_once_per_check() {
    let busy = |conflicts: usize| {
        Server::start(Arc::new(move |seen: &Asked| match seen.method {
            _ if seen.path == "/api/v1" => kinds(),
            Method::PATCH if seen.query.contains("dryRun") => (200, live("hello")),
            // A dry run precedes each write.
            Method::PATCH if seen.before < 2 * conflicts => (409, json!("changed")),
            Method::PATCH => (200, live("hello")),
            _ => (200, live("edited")),
        }))
    };
    for (conflicts, healed, writes) in [(0, 1, 1), (1, 1, 2), (9, 0, 2)] {
        let mut looks = Looks::at(busy(conflicts), DriftMode::Heal);
        let seen = looks.look(&manifest("hello")).await.unwrap();
        assert_eq!(seen.findings.len(), healed, "{conflicts}");
        assert_eq!(looks.server.writes().len(), writes, "{conflicts}");
    }
}

#[tokio::test(start_paused = true)]
async fn cancelled_check_sends_no_requests() {
    let mut looks = Looks::at(server(Some(live("edited"))), DriftMode::Heal);
    looks.cancel.cancel();
    let error = looks.look(&manifest("hello")).await.unwrap_err();
    assert!(matches!(error, LookError::CalledOff));
    assert!(looks.server.asked().is_empty());
}

#[tokio::test(start_paused = true)]
async fn adopted_object_in_default_namespace_is_not_recreated() {
    let of = |release: &'static str| {
        Server::start(Arc::new(move |seen| match seen.path.as_str() {
            "/api/v1" => kinds(),
            "/api/v1/namespaces/default/configmaps/web" => {
                let mut live = live("hello");
                live["metadata"]["annotations"]["meta.helm.sh/release-name"] = json!(release);
                (200, live)
            }
            _ if seen.method == Method::PATCH => (200, seen.body.clone()),
            _ => (404, json!("not found")),
        }))
    };
    let placed = {
        let mut placed = manifest("hello");
        placed["metadata"]["namespace"] = json!("acme");
        placed
    };
    for (adopted, release, manifest, writes) in [
        (true, "web", manifest("hello"), 0),
        // The object counts as deleted: Krypton's revision, another release's object, or a namespace in the chart.
        (false, "web", manifest("hello"), 1),
        (true, "other", manifest("hello"), 1),
        (true, "web", placed, 1),
    ] {
        let mut looks = Looks::at(of(release), DriftMode::Heal);
        looks.adopted = adopted;
        let seen = looks.look(&manifest).await.unwrap();
        assert_eq!(seen.findings.len(), writes, "{adopted} {release}");
        assert_eq!(looks.server.writes().len(), writes, "{adopted} {release}");
    }
}

#[tokio::test(start_paused = true)]
async fn unrecorded_manifest_reads_nothing_outside_the_workspace() {
    for mode in [DriftMode::Warn, DriftMode::Heal] {
        let mut looks = Looks::at(server(Some(live("edited"))), mode);
        looks.recorded = false;
        let mut elsewhere = manifest("guessed");
        elsewhere["metadata"]["namespace"] = json!("other");
        let cluster_wide =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}});
        for outside in [&elsewhere, &cluster_wide] {
            let seen = looks.look(outside).await.unwrap();
            assert!(seen.findings.is_empty() && seen.unseen.is_empty());
        }
        let asked = looks.server.asked();
        assert!(asked.iter().all(|seen| seen.path == "/api/v1"), "{asked:?}");
        let seen = looks.look(&manifest("hello")).await.unwrap();
        assert_eq!(outcomes(&seen), [&Outcome::Left]);
        assert!(looks.server.writes().is_empty());
    }
}

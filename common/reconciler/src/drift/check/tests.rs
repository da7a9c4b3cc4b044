//! Tests against an API server with one object, whose responses each test defines.

use http::Method;
use serde_json::json;

use super::*;
use crate::drift::ignore;
use crate::stub_server::{ReceivedRequest, StubServer};

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
    ReleaseKey::new("acme", "web")
}

/// Returns a server with or without this object. An apply returns the object with the manifest's data.
fn server(live: Option<Value>) -> StubServer {
    StubServer::start(move |request| match (&request.method, &live) {
        _ if request.path == "/api/v1" => kinds(),
        (&Method::PATCH, _) => {
            let mut after = live.clone().unwrap_or_else(|| request.body.clone());
            after["data"] = request.body["data"].clone();
            (200, after)
        }
        (_, Some(live)) => (200, live.clone()),
        (_, None) => (404, json!("not found")),
    })
}

fn kinds() -> (u16, Value) {
    let kind = json!({"name": "configmaps", "singularName": "", "kind": "ConfigMap", "namespaced": true, "verbs": []});
    let wide = json!({"name": "namespaces", "singularName": "", "kind": "Namespace", "namespaced": false, "verbs": []});
    (
        200,
        json!({"groupVersion": "v1", "resources": [kind, wide]}),
    )
}

struct CheckFixture {
    server: StubServer,
    cache: DriftCache,
    settings: DriftSettings,
    may_write: bool,
    adopted: bool,
    recorded: bool,
    cancel: CancellationToken,
}

impl CheckFixture {
    pub(crate) fn new(server: StubServer, mode: DriftMode) -> Self {
        let settings = DriftSettings {
            mode,
            interval_seconds: 600,
            ..DriftSettings::default()
        };
        Self {
            server,
            cache: DriftCache::default(),
            settings,
            may_write: true,
            adopted: false,
            recorded: true,
            cancel: CancellationToken::new(),
        }
    }

    async fn check(&mut self, manifest: &Value) -> Result<DriftReport, CheckError> {
        let metrics = DriftMetrics::default();
        let check = DriftCheck {
            release: release(),
            revision: 1,
            settings: self.settings.clone(),
            cancel: self.cancel.clone(),
            adopted: self.adopted,
        };
        let input = CheckInput {
            check: &check,
            client: &self.server.client,
            metrics: &metrics,
            recorded: self.recorded,
            may_write: &|| self.may_write,
        };
        check_release(&input, &mut self.cache, std::slice::from_ref(manifest)).await
    }

    fn writes(&self) -> Vec<ReceivedRequest> {
        let is_dry_run = |request: &ReceivedRequest| request.query.contains("dryRun=All");
        let mut requests = self.server.requests();
        requests.retain(|request| request.method == Method::PATCH && !is_dry_run(request));
        requests
    }
}

fn outcomes(report: &DriftReport) -> Vec<&FindingOutcome> {
    report
        .findings
        .iter()
        .map(|finding| &finding.outcome)
        .collect()
}

#[tokio::test(start_paused = true)]
async fn matching_object_is_compared_again_only_after_change() {
    let mut fixture = CheckFixture::new(server(Some(live("hello"))), DriftMode::Heal);
    for _ in 0..3 {
        let report = fixture.check(&manifest("hello")).await.unwrap();
        assert_eq!((report.findings.len(), report.not_compared.len()), (0, 0));
    }
    let requests = fixture.server.requests();
    let count = |method: Method| requests.iter().filter(|it| it.method == method).count();
    assert_eq!(count(Method::PATCH), 1, "{requests:?}");
    // The kinds are read once, and the object at each check.
    assert_eq!(count(Method::GET), 1 + 3, "{requests:?}");
    // Changed rules invalidate the previous result.
    fixture.settings.rules = ignore::parse_rules("/data/x").0;
    fixture.check(&manifest("hello")).await.unwrap();
    let requests = fixture.server.requests();
    assert_eq!(requests.last().unwrap().method, Method::PATCH);
    assert!(fixture.writes().is_empty());
}

#[tokio::test(start_paused = true)]
async fn drift_is_corrected_as_helm_only_when_allowed() {
    let mut fixture = CheckFixture::new(server(Some(live("edited"))), DriftMode::Warn);
    let report = fixture.check(&manifest("hello")).await.unwrap();
    assert_eq!(outcomes(&report), [&FindingOutcome::ReportedOnly]);
    assert_eq!(report.findings[0].writer.as_deref(), Some("kubectl-edit"));
    assert!(fixture.writes().is_empty());
    fixture.settings.mode = DriftMode::Heal;
    fixture.may_write = false;
    let error = fixture.check(&manifest("hello")).await.unwrap_err();
    assert!(matches!(error, CheckError::Cancelled) && fixture.writes().is_empty());
    fixture.may_write = true;
    let report = fixture.check(&manifest("hello")).await.unwrap();
    assert_eq!(outcomes(&report), [&FindingOutcome::Healed]);
    let writes = fixture.writes();
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
    let mut fixture = CheckFixture::new(server(None), DriftMode::Heal);
    let report = fixture.check(&manifest("hello")).await.unwrap();
    assert_eq!(report.findings[0].difference, Difference::Deleted);
    assert_eq!(outcomes(&report), [&FindingOutcome::Healed]);
    let writes = fixture.writes();
    assert_eq!(writes.len(), 1);
    assert!(!writes[0].query.contains("force"), "{}", writes[0].query);
}

#[tokio::test]
async fn missing_job_is_not_recreated() {
    let server = StubServer::start(|request| match request.path.as_str() {
        "/apis/batch/v1" => {
            let kind = json!({"name": "jobs", "singularName": "", "kind": "Job", "namespaced": true, "verbs": []});
            (
                200,
                json!({"groupVersion": "batch/v1", "resources": [kind]}),
            )
        }
        _ => (404, json!("not found")),
    });
    let mut fixture = CheckFixture::new(server, DriftMode::Heal);
    let job = json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "once"}});
    let report = fixture.check(&job).await.unwrap();
    let requests = fixture.server.requests();
    assert!(
        requests
            .iter()
            .any(|request| request.path.ends_with("/jobs/once")),
        "{requests:?}"
    );
    assert!(
        report.findings.is_empty() && report.not_compared.is_empty(),
        "{report:?}"
    );
    assert!(
        requests.iter().all(|request| request.method == Method::GET),
        "{requests:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn recurring_drift_is_held_back_after_three_corrections() {
    let mut fixture = CheckFixture::new(server(Some(live("edited"))), DriftMode::Heal);
    let mut all = Vec::new();
    for _ in 0..5 {
        let report = fixture.check(&manifest("hello")).await.unwrap();
        all.extend(outcomes(&report).into_iter().cloned());
    }
    let [healed, held] = [FindingOutcome::Healed, FindingOutcome::HeldBack];
    assert_eq!(
        all,
        [healed.clone(), healed.clone(), healed, held.clone(), held]
    );
    assert_eq!(fixture.writes().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn foreign_excluded_or_terminating_object_is_never_written() {
    let annotated = |key: &str, value: &str| {
        let mut live = live("edited");
        live["metadata"]["annotations"][key] = json!(value);
        live
    };
    let foreign = annotated("meta.helm.sh/release-name", "other");
    let mut fixture = CheckFixture::new(server(Some(foreign)), DriftMode::Heal);
    let report = fixture.check(&manifest("hello")).await.unwrap();
    assert_eq!(
        outcomes(&report),
        [&FindingOutcome::OtherRelease("acme/other".to_owned())]
    );
    let mut terminating = live("edited");
    terminating["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    for object in [annotated(DRIFT_ANNOTATION, "off"), terminating] {
        let mut excluded = CheckFixture::new(server(Some(object)), DriftMode::Heal);
        let report = excluded.check(&manifest("hello")).await.unwrap();
        assert_eq!(report.findings, []);
        assert!(excluded.writes().is_empty());
    }
    assert!(fixture.writes().is_empty());
}

#[tokio::test(start_paused = true)]
async fn uncomparable_object_is_reported_unhealthy_apiserver_aborts_check() {
    let server_failing_at = |method: Method, code: u16| {
        StubServer::start(move |request| match request.path.as_str() {
            "/api/v1" => kinds(),
            _ if request.method == method => (code, json!("the reason")),
            _ => (200, live("hello")),
        })
    };
    for (method, code) in [
        (Method::GET, 403),
        (Method::PATCH, 403),
        (Method::PATCH, 400),
        (Method::PATCH, 422),
        (Method::PATCH, 500),
    ] {
        let mut fixture =
            CheckFixture::new(server_failing_at(method.clone(), code), DriftMode::Heal);
        let report = fixture.check(&manifest("hello")).await.unwrap();
        assert_eq!(report.findings, [], "{method} {code}");
        assert_eq!(report.not_compared[0].1, "the reason", "{method} {code}");
        assert!(fixture.writes().is_empty());
    }
    for code in [401, 429, 503, 504] {
        let mut fixture = CheckFixture::new(server_failing_at(Method::GET, code), DriftMode::Heal);
        let error = fixture.check(&manifest("hello")).await.unwrap_err();
        assert!(matches!(error, CheckError::Failed(_)), "{code}");
    }
    // A check queries an unserved kind only once.
    let mut fixture = CheckFixture::new(server(None), DriftMode::Heal);
    let gone = json!({"apiVersion": "v1", "kind": "Widget", "metadata": {"name": "a"}});
    let report = fixture.check(&gone).await.unwrap();
    assert!(
        report.not_compared[0].1.contains("no kind Widget"),
        "{report:?}"
    );
    assert_eq!(fixture.server.requests().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn conflicting_write_is_retried_once_per_check() {
    let server_with_conflicts = |conflicts: usize| {
        StubServer::start(move |request| match request.method {
            _ if request.path == "/api/v1" => kinds(),
            Method::PATCH if request.query.contains("dryRun") => (200, live("hello")),
            // A dry run precedes each write.
            Method::PATCH if request.earlier < 2 * conflicts => (409, json!("changed")),
            Method::PATCH => (200, live("hello")),
            _ => (200, live("edited")),
        })
    };
    for (conflicts, healed, writes) in [(0, 1, 1), (1, 1, 2), (9, 0, 2)] {
        let mut fixture = CheckFixture::new(server_with_conflicts(conflicts), DriftMode::Heal);
        let report = fixture.check(&manifest("hello")).await.unwrap();
        assert_eq!(report.findings.len(), healed, "{conflicts}");
        assert_eq!(fixture.writes().len(), writes, "{conflicts}");
    }
}

#[tokio::test(start_paused = true)]
async fn cancelled_check_sends_no_requests() {
    let mut fixture = CheckFixture::new(server(Some(live("edited"))), DriftMode::Heal);
    fixture.cancel.cancel();
    let error = fixture.check(&manifest("hello")).await.unwrap_err();
    assert!(matches!(error, CheckError::Cancelled));
    assert!(fixture.server.requests().is_empty());
}

#[tokio::test(start_paused = true)]
async fn adopted_object_in_default_namespace_is_not_recreated() {
    let server_for = |release: &'static str| {
        StubServer::start(move |request| match request.path.as_str() {
            "/api/v1" => kinds(),
            "/api/v1/namespaces/default/configmaps/web" => {
                let mut live = live("hello");
                live["metadata"]["annotations"]["meta.helm.sh/release-name"] = json!(release);
                (200, live)
            }
            _ if request.method == Method::PATCH => (200, request.body.clone()),
            _ => (404, json!("not found")),
        })
    };
    let with_namespace = {
        let mut with_namespace = manifest("hello");
        with_namespace["metadata"]["namespace"] = json!("acme");
        with_namespace
    };
    for (adopted, release, manifest, writes) in [
        (true, "web", manifest("hello"), 0),
        // The object counts as deleted: Krypton's revision, another release's object, or a namespace in the chart.
        (false, "web", manifest("hello"), 1),
        (true, "other", manifest("hello"), 1),
        (true, "web", with_namespace, 1),
    ] {
        let mut fixture = CheckFixture::new(server_for(release), DriftMode::Heal);
        fixture.adopted = adopted;
        let report = fixture.check(&manifest).await.unwrap();
        assert_eq!(report.findings.len(), writes, "{adopted} {release}");
        assert_eq!(fixture.writes().len(), writes, "{adopted} {release}");
    }
}

#[tokio::test(start_paused = true)]
async fn unrecorded_manifest_reads_nothing_outside_the_workspace() {
    for mode in [DriftMode::Warn, DriftMode::Heal] {
        let mut fixture = CheckFixture::new(server(Some(live("edited"))), mode);
        fixture.recorded = false;
        let mut elsewhere = manifest("guessed");
        elsewhere["metadata"]["namespace"] = json!("other");
        let cluster_wide =
            json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}});
        for outside in [&elsewhere, &cluster_wide] {
            let report = fixture.check(outside).await.unwrap();
            assert!(report.findings.is_empty() && report.not_compared.is_empty());
        }
        let requests = fixture.server.requests();
        assert!(
            requests.iter().all(|request| request.path == "/api/v1"),
            "{requests:?}"
        );
        let report = fixture.check(&manifest("hello")).await.unwrap();
        assert_eq!(outcomes(&report), [&FindingOutcome::ReportedOnly]);
        assert!(fixture.writes().is_empty());
    }
}

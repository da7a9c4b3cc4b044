//! Dumps of a fake agent.

use krypton_helm::chart::ChartRef;
use krypton_reconciler::run_loop::{ConditionDump, LeaseDump, OwnerDump};
use krypton_types::conditions::{State, Truth};
use krypton_types::desired::Version;
use serde_json::{Value, json};

use super::*;

const HIDDEN: &str = "hidden";

fn desired_state() -> DesiredState {
    let desired_state = json!({
        "version": {"epoch": 2, "generation": 7},
        "chart": {
            "repo": format!("https://user:{HIDDEN}@charts.example.org/stable"), "name": "small",
            "version": "1.0.0", "install_crds": false, "values": {"password": HIDDEN},
        },
        "paused": true,
    });
    serde_json::from_value(desired_state).unwrap()
}

fn state(truth: Truth, reason: &str) -> State {
    State {
        truth,
        reason: reason.to_owned(),
        message: HIDDEN.to_owned(),
    }
}

fn reconciler() -> ReconcilerDump {
    ReconcilerDump {
        lease: LeaseDump {
            writes: true,
            held_for_seconds: Some(40),
            seconds_since_renewal: Some(3),
            other_holder: None,
        },
        seconds_since_response: 3,
        tenant_crd: Some("present"),
        lists_complete: true,
        recorded_version: Some("2.7".to_owned()),
        newer_recorded_version: None,
        running: 0,
        owner_count: 1,
        owners: vec![OwnerDump {
            kind: "Tenant",
            key: "default/acme".to_owned(),
            generation: 3,
            being_removed: false,
            release: "acme/tenant-acme-edge-1".to_owned(),
            revision: Some(2),
            locked: false,
            ready: Some(ConditionDump::new(&state(Truth::False, "UpgradeFailed"))),
            progress: None,
            error: Some(ConditionDump::new(&state(Truth::True, "UpgradeFailed"))),
            running: false,
            failure_reason: Some("UpgradeFailed"),
            attempts: 4,
            retry_in_seconds: Some(20),
            next_step: Some("Retry"),
            next_reconcile_in_seconds: Some(20),
        }],
    }
}

/// A view before the agent has joined, with the senders that update it.
fn view() -> (
    AgentView,
    watch::Sender<Contact>,
    watch::Sender<Option<Arc<DesiredState>>>,
) {
    let contact = watch::Sender::default();
    let desired = watch::Sender::new(None);
    let view = AgentView {
        replica: "krypton-agent-0".to_owned(),
        started: Timestamp::UNIX_EPOCH,
        contact: contact.subscribe(),
        expiry: watch::channel(Timestamp::UNIX_EPOCH).1,
        desired: desired.subscribe(),
        report_store: Arc::default(),
        work: WorkMetrics::default(),
        joined: OnceLock::new(),
    };
    (view, contact, desired)
}

fn at(seconds: u64) -> BootTime {
    BootTime(Duration::from_secs(seconds))
}

fn dump_value(view: &AgentView, reconciler: Result<ReconcilerDump, &'static str>) -> Value {
    let dump = view.snapshot(Load::default(), reconciler, at(100));
    let mut dump = serde_json::to_value(dump).unwrap();
    assert!(!dump.to_string().contains(HIDDEN), "{dump}");
    dump["now"] = Value::Null;
    dump
}

#[test]
fn dump_before_join_has_no_member_state() {
    let (view, ..) = view();
    assert_eq!(view.no_reconciler_reason(), Some("notJoined"));
    let dump = dump_value(&view, Err("notJoined"));
    assert_eq!(dump["reconciling"], "notJoined");
    for field in [
        "member",
        "certificateExpiry",
        "desired",
        "applied",
        "reconciler",
    ] {
        assert_eq!(dump[field], Value::Null, "{field}");
    }
    assert_eq!(dump["session"]["up"], false);
}

#[tokio::test]
async fn agent_dump_shows_state_but_no_secrets() {
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    let (view, contact, desired) = view();
    let folder = tempfile::tempdir().unwrap();
    let charts = Arc::new(ChartCache::new(folder.path().join("charts")).unwrap());
    let chart = ChartRef {
        repo: String::new(),
        name: format!("{}/none.tgz", folder.path().display()),
        version: "1.0.0".to_owned(),
    };
    charts.fetch(&chart).await.unwrap_err();
    let (name, joined) = (chart.name, Arc::clone(&charts));
    view.joined.get_or_init(|| ("edge-1".to_owned(), joined));
    assert_eq!(view.no_reconciler_reason(), Some("noDesiredState"));
    desired.send_replace(Some(Arc::new(desired_state())));
    assert_eq!(view.no_reconciler_reason(), None);
    contact.send_replace(Contact {
        up: true,
        since: Some(at(60)),
        last_message: Some(at(98)),
        address: Some("hub.example.org:7443".to_owned()),
        hub_version: Some("0.1.0".to_owned()),
        session: Some(17),
    });
    let mut report = krypton_types::member::MemberReport::default();
    let version = Version {
        epoch: 2,
        generation: 6,
    };
    report.applied = Some((version, "sha".to_owned()));
    view.report_store.set_member(&report);
    let mut dump = dump_value(&view, Ok(reconciler()));
    assert_eq!(dump["desired"]["digest"].take(), desired_state().digest());
    let cached = dump["charts"].take();
    assert_eq!(cached[0]["state"], "failed");
    assert_eq!(cached[0]["fault"], "ChartNotLoaded");
    assert_eq!(cached[0]["attempts"], 1);
    assert_eq!(cached[0]["chart"]["name"], name);
    assert_eq!(
        dump["reconciler"].take(),
        json!({
            "lease": {
                "writes": true, "heldForSeconds": 40, "secondsSinceRenewal": 3, "otherHolder": null,
            },
            "secondsSinceResponse": 3,
            "tenantCrd": "present",
            "listsComplete": true,
            "recordedVersion": "2.7",
            "newerRecordedVersion": null,
            "running": 0,
            "ownerCount": 1,
            "owners": [{
                "kind": "Tenant", "key": "default/acme", "generation": 3, "beingRemoved": false,
                "release": "acme/tenant-acme-edge-1", "revision": 2, "locked": false,
                "ready": { "status": "False", "reason": "UpgradeFailed" },
                "progress": null,
                "error": { "status": "True", "reason": "UpgradeFailed" },
                "running": false, "failureReason": "UpgradeFailed", "attempts": 4, "retryInSeconds": 20,
                "nextStep": "Retry", "nextReconcileInSeconds": 20,
            }],
        })
    );
    assert_eq!(
        dump,
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "replica": "krypton-agent-0",
            "started": "1970-01-01T00:00:00Z",
            "now": null,
            "member": "edge-1",
            "certificateExpiry": null,
            "session": {
                "up": true, "forSeconds": 40, "secondsSinceMessage": 2, "hub": "hub.example.org:7443",
                "hubVersion": "0.1.0", "number": 17,
            },
            "desired": {
                "version": "2.7", "digest": null, "paused": true, "decommission": false, "deployments": 0, "placed": 0,
                "chart": { "repo": "https://charts.example.org/stable", "name": "small", "version": "1.0.0" },
            },
            "applied": { "version": "2.6", "digest": "sha" },
            "unsentReports": 0,
            "helm": { "limit": 0, "limitPerMember": 0, "running": {}, "waiting": [] },
            "charts": null,
            "waiting": { "calls": 0, "lists": 0, "runs": 0, "urgent": 0 },
            "reconciling": "reported",
            "reconciler": null,
        })
    );
}

#[tokio::test(start_paused = true)]
async fn busy_or_ended_reconciler_does_not_block_dump() {
    let (request_tx, mut request_rx) = mpsc::channel::<DumpRequest>(1);
    assert_eq!(query_reconciler(&request_tx).await.err(), Some("busy"));
    // The next request waits behind the first, which has timed out.
    let responder = tokio::spawn(async move {
        while let Some(request) = request_rx.recv().await {
            drop(request.send(reconciler()));
        }
    });
    assert_eq!(query_reconciler(&request_tx).await.unwrap().owner_count, 1);
    responder.abort();
    drop(responder.await);
    assert_eq!(query_reconciler(&request_tx).await.err(), Some("ended"));
}

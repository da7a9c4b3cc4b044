//! Builds the metrics of hubs and agents in healthy and failing states.

use std::{sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use krypton_agent::{
    metrics::{self, AgentMetrics},
    session::Link,
};
use krypton_crds::edge_cluster::Mode;
use krypton_hub::{
    edgecluster::FleetChart,
    leader::{Leader, LeaderState},
    members::{member::PublishedState, tenant_reports::TenantReportChanges},
    observe::{
        member_metrics::{FleetView, HomeState},
        metrics::registry,
    },
};
use krypton_reconciler::{drift::DriftMetrics, metrics::WorkMetrics};
use krypton_runtime::clock::BootTime;
use krypton_types::conditions::reason;
use krypton_types::validity::Validity;
use krypton_types::{
    conditions::{ClusterState, State, Truth},
    desired::{DesiredState, Version},
    tenant::{TenantKey, TenantReport},
};
use prometheus_client::{encoding::text::encode, registry::Registry};
use serde_json::json;
use tokio::sync::watch;

fn rendered(registry: &Registry) -> String {
    let mut text = String::new();
    encode(&mut text, registry).unwrap();
    text
}

fn desired() -> DesiredState {
    let desired = json!({
        "version": {"epoch": 3, "generation": 2},
        "chart": {"repo": "", "name": "small", "version": "1.0.0", "install_crds": false, "values": {}},
        "paused": false,
    });
    serde_json::from_value(desired).unwrap()
}

fn days_from_now(days: i64) -> Timestamp {
    Timestamp::now() + SignedDuration::from_hours(24 * days)
}

fn report(ready: Truth, error: Option<Truth>) -> TenantReport {
    let state = |truth| State::new(truth, "Because", "");
    let state = ClusterState {
        ready: state(ready),
        progress: None,
        error: error.map(state),
    };
    TenantReport::new(1, state)
}

/// Returns the metrics of a leader or follower. The member edge-1 has applied this version.
fn hub_metrics(is_leader: bool, applied: Version, days_left: i64) -> String {
    let view = Arc::new(FleetView::default());
    let since = BootTime(BootTime::now().0.saturating_sub(Duration::from_secs(1000)));
    let published = PublishedState {
        desired: Arc::new(desired()),
        message: Arc::default(),
        since,
    };
    let member = view.members.get_or_create("edge-1", "uid");
    member.published.send_replace(Some(published));
    view.members.observe("edge-1", |observed| {
        observed.mode = Mode::Agent;
        observed.connected = State::new(Truth::True, reason::CONNECTED, "");
        observed.applied = Some((applied, String::new()));
        observed.certificate = Some(Validity::until(days_from_now(days_left)));
        observed.access = Some(Validity {
            not_before: days_from_now(-100),
            not_after: days_from_now(days_left),
        });
    });
    for (name, mode) in [
        ("lost-1", Mode::None),
        ("lost-2", Mode::Proxy),
        ("lost-3", Mode::Agent),
    ] {
        view.members.observe(name, |observed| {
            observed.mode = mode;
            observed.connected = State::new(Truth::False, reason::UNREACHABLE, "");
        });
    }
    view.members.observe("asleep", |observed| {
        observed.healthy = State::new(Truth::Unknown, reason::SUSPENDED, "");
    });
    let key = |name: &str| TenantKey::new("default", name);
    let reports = [
        (
            key("failing"),
            Some(report(Truth::False, Some(Truth::True))),
        ),
        (key("pending"), Some(report(Truth::False, None))),
    ];
    view.reports
        .apply("edge-1", TenantReportChanges::new(reports.into()));
    let lead = if is_leader {
        Leader::always_leading()
    } else {
        Leader::with_state(LeaderState::Standby { leader: None }).1
    };
    let chart = FleetChart {
        epoch: 3,
        chart: None,
        problem: None,
    };
    view.set_home_state(HomeState {
        leader: lead,
        chart: watch::channel(chart).1,
        allow_chart_skip: false,
    });
    let sessions = &view.sessions;
    sessions.set_certificate_expiry("hub", days_from_now(days_left));
    sessions.set_certificate_expiry("ca", days_from_now(days_left));
    let (drift, work) = (DriftMetrics::default(), WorkMetrics::default());
    rendered(&registry(view, &drift, &work))
}

/// Returns the metrics of a hub with every series.
pub(super) fn hub() -> String {
    hub_metrics(true, desired().version, 0)
}

/// Returns the metrics of a leader whose fleet has every problem.
pub(super) fn ailing_hub() -> String {
    let before = Version {
        epoch: 3,
        generation: 1,
    };
    hub_metrics(true, before, 0)
}

pub(super) fn hub_that_follows() -> String {
    hub_metrics(false, desired().version, 0)
}

fn agent_metrics(days_left: i64) -> String {
    let state = AgentMetrics {
        link: watch::channel(Link::default()).1,
        expiry: watch::channel(days_from_now(days_left)).1,
        desired: watch::channel(Some(Arc::new(desired()))).1,
        report_store: Arc::default(),
    };
    let (drift, work) = (DriftMetrics::default(), WorkMetrics::default());
    rendered(&metrics::registry(state, &drift, &work))
}

/// Returns the metrics of an agent with every series.
pub(super) fn agent() -> String {
    agent_metrics(30)
}

/// Returns the metrics of a disconnected agent whose certificate is about to expire.
pub(super) fn ailing_agent() -> String {
    agent_metrics(0)
}

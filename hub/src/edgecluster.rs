//! The EdgeClusters: one for each source and for each agent that has joined. The controller creates them, runs a proxy
//! for each source, gives each member its desired state, and writes their status.

mod acceptance;
mod api;
mod controller;
pub mod credential_expiry;
mod decommission;
mod desired_status;
mod member;
mod messages;
mod namespaces;
mod plan;
mod proxies;
pub mod publisher;
mod source_history;
pub mod status;
mod values;

use std::sync::Arc;
use std::time::Duration;

use krypton_crds::edge_cluster::EdgeCluster;
use krypton_runtime::clock;
use krypton_runtime::watch::{Watch, list_refusal};
use krypton_types::desired::{ChartState, DesiredState};
use krypton_types::error_chain::chain;
use kube::Client;
use kube::api::Api;
use kube::runtime::watcher::Config;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::chart::values::ValuesProblem;
use crate::discovery::Sources;
use crate::leader::Leader;
use crate::members::tenant_reports::TenantReports;
use crate::proxy::Shared;

pub use acceptance::AcceptedNamespaces;
use controller::{FleetController, Pass};
pub use values::MemberValues;

/// Pause after a failed read or write of the register, with 50 % jitter.
const AFTER_FAILURE: Duration = Duration::from_secs(3);
/// Interval for checking `lastSeen`, which is written once a minute.
const HEARTBEAT: Duration = Duration::from_secs(20);
/// Maximum number of EdgeCluster writes in flight.
const WRITERS: usize = 16;
/// Minimum interval between two decisions.
const RECONCILE_EVERY: Duration = Duration::from_millis(100);
/// How long the hub waits for sources that have not listed yet before it assigns new names.
const SOURCES_GRACE: Duration = Duration::from_secs(10);
/// Time in a term after which the recorded state of a silent member expires. By then an agent has timed
/// out, which takes 30 s, and a kubeconfig's cluster has answered or not.
const SILENT_AFTER: Duration = Duration::from_secs(45);
/// Maximum number of events and members to handle before other tasks run.
const BATCH: usize = 512;

/// The chart state of the fleet, and the epoch in which the hub publishes it.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetChart {
    pub epoch: u64,
    /// `None` before the first one.
    pub chart: Option<Arc<ChartState>>,
    /// Why `chart` is not up to date.
    pub problem: Option<ValuesProblem>,
}

/// Inputs of the controller.
pub(crate) struct FleetInputs {
    pub client: Client,
    /// The hub's namespace on home.
    pub namespace: String,
    /// The access to home as a member. `None` without `--self-cluster`.
    pub home: Option<kube::Config>,
    pub sources: watch::Receiver<Sources>,
    pub accepted_namespaces: AcceptedNamespaces,
    pub chart: watch::Receiver<FleetChart>,
    /// The settings that are the same for all members. A member may override the labels and annotations of workspaces.
    pub desired: DesiredState,
    /// Whether the hub places home's Tenants on members.
    pub place_tenants: bool,
    /// Values of members, over the fleet's.
    pub member_values: MemberValues,
    /// Whether this hub leads, and writes on home.
    pub leader: Leader,
    pub shared: Arc<Shared>,
    pub reports: Arc<TenantReports>,
}

/// Follows sources and EdgeClusters until `stop`, then stops all proxies and waits for them.
pub(crate) async fn run(fleet: FleetInputs, stop: CancellationToken) {
    let api: Api<EdgeCluster> = Api::all(fleet.client.clone());
    let mut events = Watch::objects(api, Config::default());
    let mut heartbeat = tokio::time::interval(HEARTBEAT);
    let mut controller = FleetController::new(fleet);
    loop {
        let pass = Pass::new(&controller.fleet.leader);
        let relisted = events.restart_for_term(pass.leader_state.term_since());
        controller.begin_pass(relisted, &pass);
        if controller.is_due(&pass) {
            controller.reconcile(events.term(), &pass);
            // Without this, one poll would run as long as anything is ready.
            tokio::task::yield_now().await;
        }
        let (due, has_more) = controller.write(&pass);
        tokio::select! {
            () = stop.cancelled() => break,
            () = tokio::task::yield_now(), if has_more => {}
            changed = controller.fleet.sources.changed() => {
                if changed.is_err() { break }
                controller.request_reconcile();
            }
            changed = controller.fleet.chart.changed() => {
                if changed.is_err() { break }
                // A new chart goes out immediately.
                controller.request_reconcile_now();
            }
            changed = controller.fleet.member_values.readings.changed() => {
                if changed.is_err() { break }
                controller.request_reconcile();
            }
            // Their sender may have ended. The last orders remain valid.
            Ok(()) = controller.deployment_orders.changed() => controller.request_reconcile(),
            Ok(()) = controller.placement_orders.changed() => controller.request_reconcile(),
            is_open = controller.fleet.leader.changed() => {
                if !is_open { break }
                controller.request_reconcile_now();
            }
            () = controller.fleet.shared.members.uid_changed.notified() => controller.request_reconcile(),
            () = controller.fleet.shared.members.changed.notified() => {}
            _ = heartbeat.tick() => controller.request_full_check(),
            event = events.next() => match event {
                Ok(event) => controller.apply_events(event, &mut events),
                Err(error) => {
                    tracing::warn!(error = %chain(&error), "watching EdgeClusters failed; retrying");
                    // While the CRD is missing, no list reports the deletions.
                    controller.edge_clusters.any_deleted |= list_refusal(&error) == Some(404);
                }
            },
            Some(name) = controller.proxies.next_stopped() => controller.proxy_ended(&name),
            () = controller.history.request_done(&mut controller.edge_clusters) => controller.request_reconcile(),
            (key, read) = controller.deletion_reads.next() => controller.apply_deletion_read(key, read),
            (name, written) = controller.writes.next() => controller.apply_write(&name, written),
            () = clock::sleep_until(due, pass.now) => {}
        }
    }
    controller.proxies.stop().await;
}

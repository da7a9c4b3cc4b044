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
use krypton_runtime::watch::Watch;
use krypton_types::desired::ChartState;
use krypton_types::desired::crd_policy::CrdPolicy;
use krypton_types::desired::drift::DriftPolicy;
use krypton_types::desired::handling::Handling;
use krypton_types::desired::lockdown::Lockdown;
use krypton_types::desired::namespaces::NamespaceConfiguration;
use krypton_types::error_chain::chain;
use kube::Client;
use kube::api::Api;
use kube::runtime::watcher::Config;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::chart::values::Problem;
use crate::discovery::Sources;
use crate::leader::Leader;
use crate::proxy::Shared;
use crate::tenants::Reports;

pub use acceptance::Accepting;
use controller::{Controller, Pass};
pub use values::Overlaying;

/// Pause after a failed read or write of the register, with 50 % jitter.
const AFTER_FAILURE: Duration = Duration::from_secs(3);
/// Interval for checking `lastSeen`, which is written once a minute.
const HEARTBEAT: Duration = Duration::from_secs(20);
/// Maximum number of EdgeCluster writes in flight.
const WRITERS: usize = 16;
/// Minimum interval between two decisions.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long the hub waits for sources that have not listed yet before it assigns new names.
const PATIENCE: Duration = Duration::from_secs(10);
/// Time in a term after which the recorded state of a silent member expires. By then an agent has timed
/// out, which takes 30 s, and a kubeconfig's cluster has answered or not.
const UNHEARD: Duration = Duration::from_secs(45);
/// Maximum number of events and members to handle before other tasks run.
const BATCH: usize = 512;

/// The chart state of the fleet, and the epoch in which the hub publishes it.
#[derive(Clone, Debug, PartialEq)]
pub struct FleetChart {
    pub epoch: u64,
    /// `None` before the first one.
    pub chart: Option<Arc<ChartState>>,
    /// Why `chart` is not up to date.
    pub problem: Option<Problem>,
}

/// Inputs of the controller.
pub struct Fleet {
    pub client: Client,
    /// The hub's namespace on home.
    pub namespace: String,
    /// The access to home as a member. `None` without `--self-cluster`.
    pub home: Option<kube::Config>,
    pub sources: watch::Receiver<Sources>,
    pub accepting: Accepting,
    pub given: watch::Receiver<FleetChart>,
    /// For all members.
    pub drift: DriftPolicy,
    pub chart_crds: CrdPolicy,
    pub tenant_values: bool,
    /// Whether the hub places home's Tenants on members.
    pub place_tenants: bool,
    /// Values of members, over the fleet's.
    pub overlaying: Overlaying,
    pub handling: Handling,
    pub lockdown: Lockdown,
    /// Labels and annotations of workspaces. A member may override them.
    pub namespaces: NamespaceConfiguration,
    /// Whether this hub leads, and writes on home.
    pub lead: Leader,
    pub shared: Arc<Shared>,
    pub reports: Arc<Reports>,
}

impl std::fmt::Debug for Fleet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fleet").finish_non_exhaustive()
    }
}

/// Follows sources and EdgeClusters until `stop`, then stops all proxies and waits for them.
pub async fn run(fleet: Fleet, stop: CancellationToken) {
    let api: Api<EdgeCluster> = Api::all(fleet.client.clone());
    let mut events = Watch::of(api, Config::default());
    let mut heartbeat = tokio::time::interval(HEARTBEAT);
    let mut controller = Controller::new(fleet);
    loop {
        let pass = Pass::now(&controller.fleet.lead);
        let listed_again = events.begin(
            pass.stand
                .leader_term()
                .map(|leader_term| leader_term.since),
        );
        controller.begin(listed_again, &pass);
        if controller.is_due(&pass) {
            controller.reconcile(events.term(), &pass);
            // Without this, one poll would run as long as anything is ready.
            tokio::task::yield_now().await;
        }
        let (wake, more) = controller.write(&pass);
        tokio::select! {
            () = stop.cancelled() => break,
            () = tokio::task::yield_now(), if more => {}
            changed = controller.fleet.sources.changed() => {
                if changed.is_err() { break }
                controller.look();
            }
            changed = controller.fleet.given.changed() => {
                if changed.is_err() { break }
                // A new chart goes out immediately.
                controller.look_now();
            }
            changed = controller.fleet.overlaying.readings.changed() => {
                if changed.is_err() { break }
                controller.look();
            }
            // Their sender may have ended. The last orders remain valid.
            Ok(()) = controller.orders.changed() => controller.look(),
            Ok(()) = controller.placements.changed() => controller.look(),
            decided = controller.fleet.lead.changed() => {
                if !decided { break }
                controller.look_now();
            }
            () = controller.fleet.shared.members.uid_changed.notified() => controller.look(),
            () = controller.fleet.shared.members.changed.notified() => {}
            _ = heartbeat.tick() => controller.look_at_all(),
            event = events.next() => match event {
                Ok(event) => controller.see(event, &mut events),
                Err(error) => tracing::warn!(error = %chain(&error), "watching EdgeClusters failed; retrying"),
            },
            Some(name) = controller.proxies.ended() => controller.proxy_ended(&name),
            () = controller.book.answered(&mut controller.known) => controller.look(),
            Some(Ok(reading)) = controller.readings.join_next(), if !controller.readings.is_empty() => {
                controller.take_reading(reading);
            }
            (name, written) = controller.writes.next() => controller.take_written(&name, written),
            () = clock::sleep_until(wake, pass.now) => {}
        }
    }
    controller.proxies.stop().await;
}

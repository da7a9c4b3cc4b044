//! Defines the faults of the soak test, their durations, and the time that Krypton can take afterwards.

use std::time::Duration;

use krypton_tests::{FalseResponse, Fault as RepositoryFault, Traffic};

use super::whom::{Edge, HubId, Object, Tenant, Workspace};

/// Maximum wait after an API server, a connection or a response recovers. The back-off of hub and agent ends at 30 s
/// and never exceeds the time waited so far.
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// A killed process doesn't release its Lease. Its successor waits until the Lease is unchanged for 60 s.
const LEASE_EXPIRY: Duration = Duration::from_secs(66);
/// Time for Helm, not a back-off, because every Tenant gets a new chart state.
const ROLLOUT: Duration = Duration::from_secs(15);
/// A stopping hub waits for Helm.
const HUB_STOP: Duration = Duration::from_secs(10);
/// Time to stop all hubs, one after the other.
const ALL_HUBS_STOP: Duration = Duration::from_secs(20);

/// The responses of a proxy in place of the API server's.
pub(crate) const FALSE_RESPONSES: [FalseResponse; 9] = [
    FalseResponse::Status(403),
    FalseResponse::Status(404),
    FalseResponse::Status(410),
    FalseResponse::Status(429),
    FalseResponse::Status(500),
    FalseResponse::Page(200),
    FalseResponse::Page(502),
    FalseResponse::Nothing,
    FalseResponse::Closed,
];

/// The statuses that another client writes to the newest revision of a release.
pub(crate) const MARKS: [&str; 4] = [
    "pending-upgrade",
    "pending-rollback",
    "failed",
    "superseded",
];

/// Defines the actions and their kinds. Each row has the parameters, the relative frequency and a description.
macro_rules! actions {
    ($(
        $(#[$comment:meta])*
        $kind:ident $(($($parameter:ty),+))?: $weight:literal, $description:literal;
    )+) => {
        /// The start of a fault, or a user action, with all random parameters.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Action {
            $($(#[$comment])* $kind $(($($parameter),+))?,)+
        }

        /// The types of actions, without parameters.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
        pub(crate) enum Kind {
            $($kind,)+
        }

        impl Action {
            pub(crate) fn kind(self) -> Kind {
                match self {
                    $(Self::$kind { .. } => Kind::$kind,)+
                }
            }
        }

        impl Kind {
            /// Each kind with its relative frequency.
            const ALL: &[(Self, u32)] = &[$((Self::$kind, $weight)),+];

            pub(crate) fn description(self) -> &'static str {
                match self {
                    $(Self::$kind => $description,)+
                }
            }
        }
    };
}

actions! {
    HubKilled(HubId): 3, "hub killed (-9)";
    /// SIGTERM, then a pause after the process has ended.
    HubStopped(HubId): 2, "hub stopped (SIGTERM)";
    /// Any hub, leader or not.
    HubFrozen(HubId): 2, "hub frozen (SIGSTOP)";
    /// The current leader, for longer than its Lease, so another hub becomes leader before it resumes.
    LeadFrozen: 3, "leader frozen for longer than its Lease";
    /// All hubs together.
    HubsKilled: 2, "all hubs killed (-9) together";
    /// Between one hub and the home cluster. The API server stays reachable for all other processes.
    HomeWay(HubId, Traffic): 3, "way of one hub to home cut, slow, half-open or frozen";
    AgentKilled: 3, "agent killed (-9)";
    /// All Helm processes of hub and agent.
    HelmKilled: 5, "helm killed (-9)";
    AgentFrozen: 3, "agent frozen (SIGSTOP)";
    ApiserverKilled(Edge): 3, "apiserver killed (-9)";
    /// etcd and API server together.
    PowerLost(Edge): 2, "etcd and apiserver killed (-9)";
    /// Between the agent and this hub, or all hubs.
    Link(Option<HubId>, Traffic): 3, "link of hub and agent cut, slow, half-open or frozen";
    /// Between the actor and its API server.
    Way(Edge, Traffic): 4, "way to an apiserver cut, slow, half-open or frozen";
    Answers(Edge, FalseResponse): 6, "403, 404, 410, 429, 500, HTML, empty lists, closed watches";
    /// The Secret of edge-2 contains an invalid kubeconfig.
    Kubeconfig: 2, "kubeconfig Secret replaced by rubbish";
    /// Changes a chart value in the hub's values file to this number.
    Message(u32): 1, "values of the chart changed";
    /// Another version of the chart. Each hub is stopped and restarted with it, one after the other.
    Version(u32): 2, "version of the chart changed, hubs restarted";
    /// The repository has this fault, or is stopped.
    Repository(Option<RepositoryFault>): 2, "chart repository away";
    Crd(Edge): 2, "CRD of Tenants deleted";
    Created(Tenant, Workspace): 6, "Tenant created";
    Deleted(Tenant): 5, "Tenant deleted";
    Recreated(Tenant, Workspace): 4, "Tenant deleted and created again";
    /// Sets the workspace to its current value, if it was unset.
    WorkspaceSet(Tenant): 3, "workspace of a Tenant set";
    Paused(Tenant): 2, "Tenant paused";
    /// Deletes the newest revision, or all of them if true.
    ReleaseDeleted(Tenant, bool): 3, "release Secrets deleted";
    ReleaseDamaged(Tenant): 2, "release Secret damaged";
    /// Writes this status to the newest revision.
    ReleaseMarked(Tenant, &'static str): 3, "release marked pending, failed or superseded";
    /// The object's name contains this number.
    ForeignObject(Tenant, u32): 2, "foreign ConfigMap in a workspace";
    /// The release's name contains this number.
    ForeignRelease(Tenant, u32): 2, "foreign release in a workspace";
    ForeignFinalizer(Tenant): 2, "foreign finalizer on a Tenant";
    /// Edits the object, or deletes it if true.
    Drift(Tenant, Object, bool): 8, "object of a release edited or deleted";
}

impl Kind {
    /// Returns the kinds that apply to this number of hubs, with their frequencies.
    pub(crate) fn for_hubs(hubs: usize) -> impl Iterator<Item = (Self, u32)> {
        let multi_hub_kinds = [Self::LeadFrozen, Self::HubsKilled, Self::HomeWay];
        Self::ALL
            .iter()
            .copied()
            .filter(move |(kind, _)| hubs > 1 || !multi_hub_kinds.contains(kind))
    }
}

/// The target that a fault occupies while it lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FaultTarget {
    kind: Kind,
    edge: Option<Edge>,
    /// `None` stands for any hub, or all.
    hub: Option<HubId>,
}

impl FaultTarget {
    /// Returns true if both have the same target.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        let same_hub = match (self.hub, other.hub) {
            (Some(one), Some(another)) => one == another,
            _ => true,
        };
        self.kind == other.kind && self.edge == other.edge && same_hub
    }
}

impl Action {
    /// Returns the target that the fault occupies. Two concurrent faults with the same target would undo each other.
    pub(crate) fn target(self) -> FaultTarget {
        let kind = match self.kind() {
            Kind::HubStopped
            | Kind::HubFrozen
            | Kind::LeadFrozen
            | Kind::HubsKilled
            | Kind::Version => Kind::HubKilled,
            Kind::AgentFrozen => Kind::AgentKilled,
            Kind::PowerLost => Kind::ApiserverKilled,
            kind => kind,
        };
        FaultTarget {
            kind,
            edge: self.edge(),
            hub: self.hub(),
        }
    }

    fn hub(self) -> Option<HubId> {
        match self {
            Self::HubKilled(hub)
            | Self::HubStopped(hub)
            | Self::HubFrozen(hub)
            | Self::HomeWay(hub, _) => Some(hub),
            Self::Link(hub, _) => hub,
            _ => None,
        }
    }

    pub(crate) fn tenant(self) -> Option<Tenant> {
        match self {
            Self::Created(tenant, _)
            | Self::Deleted(tenant)
            | Self::Recreated(tenant, _)
            | Self::WorkspaceSet(tenant)
            | Self::Paused(tenant)
            | Self::ReleaseDeleted(tenant, _)
            | Self::ReleaseDamaged(tenant)
            | Self::ReleaseMarked(tenant, _)
            | Self::ForeignObject(tenant, _)
            | Self::ForeignRelease(tenant, _)
            | Self::ForeignFinalizer(tenant)
            | Self::Drift(tenant, ..) => Some(tenant),
            _ => None,
        }
    }

    pub(crate) fn edge(self) -> Option<Edge> {
        match self {
            Self::ApiserverKilled(edge)
            | Self::PowerLost(edge)
            | Self::Way(edge, _)
            | Self::Answers(edge, _)
            | Self::Crd(edge) => Some(edge),
            _ => self.tenant().map(Tenant::edge),
        }
    }
}

/// An action and its duration, which is zero if no repair follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) action: Action,
    /// Time from the start of the fault until it is repaired.
    pub(crate) away: Duration,
}

impl Fault {
    /// Time from the start of the fault until its target is free again.
    pub(crate) fn occupied_for(&self) -> Duration {
        let stop_time = match self.action.kind() {
            Kind::HubStopped => HUB_STOP,
            Kind::Version => ALL_HUBS_STOP,
            _ => Duration::from_secs(3),
        };
        self.away + stop_time
    }

    /// Time from the start of the fault until Krypton has no back-off or Lease of a dead process to wait for. Excludes
    /// the time for the actual work.
    pub(crate) fn settled_after(&self) -> Duration {
        let settle_time = match self.action.kind() {
            Kind::HubKilled | Kind::HubsKilled | Kind::AgentKilled => LEASE_EXPIRY,
            // Another process takes over a member when the frozen hub's Lease expires, or when the hub releases it.
            Kind::HubFrozen | Kind::LeadFrozen => {
                MAX_BACKOFF.max(LEASE_EXPIRY.saturating_sub(self.away))
            }
            // The hub releases its own Lease. After a restart, it observes a killed process's Lease for the full
            // period.
            Kind::HubStopped => HUB_STOP + LEASE_EXPIRY,
            Kind::Version => ALL_HUBS_STOP + LEASE_EXPIRY,
            Kind::AgentFrozen
            | Kind::ApiserverKilled
            | Kind::PowerLost
            | Kind::Link
            | Kind::HomeWay
            | Kind::Way
            | Kind::Answers
            | Kind::Kubeconfig
            | Kind::Crd => MAX_BACKOFF,
            // A back-off is at most as long as the preceding outage.
            Kind::Repository => self.away,
            Kind::Message => ROLLOUT,
            _ => Duration::ZERO,
        };
        self.away + settle_time
    }
}

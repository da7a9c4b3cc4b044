//! Defines the faults of the soak test, their durations, and the time that Krypton can take afterwards.

use std::time::Duration;

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

/// Treatment of the traffic on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TrafficFault {
    Cut,
    Slow(Duration),
    /// Half-open: data is lost.
    Swallowed,
    Frozen,
}

/// A false response in place of the API server's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ApiserverFault {
    /// To all requests.
    Status(u16),
    Page(u16),
    /// Lists are empty.
    Nothing,
    /// Watches end immediately.
    Closed,
}

impl ApiserverFault {
    pub(crate) const ALL: [Self; 9] = [
        Self::Status(403),
        Self::Status(404),
        Self::Status(410),
        Self::Status(429),
        Self::Status(500),
        Self::Page(200),
        Self::Page(502),
        Self::Nothing,
        Self::Closed,
    ];
}

/// Failure of the chart repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RepositoryFault {
    Gone,
    Failing,
    Rubbish,
}

/// Status that another client writes to the newest revision of a release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mark(pub(crate) &'static str);

impl Mark {
    pub(crate) const ALL: [Self; 4] = [
        Self("pending-upgrade"),
        Self("pending-rollback"),
        Self("failed"),
        Self("superseded"),
    ];
}

/// A fault or a user action, with all its random parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    HubKilled {
        hub: HubId,
        away: Duration,
    },
    /// SIGTERM, then a pause of this length after the process has ended.
    HubStopped {
        hub: HubId,
        away: Duration,
    },
    /// Any hub, leader or not.
    HubFrozen {
        hub: HubId,
        away: Duration,
    },
    /// The current leader, for longer than its Lease, so another hub becomes leader before it resumes.
    LeadFrozen {
        away: Duration,
    },
    /// All hubs together.
    HubsKilled {
        away: Duration,
    },
    /// Between one hub and the home cluster. The API server stays reachable for all other processes.
    HomeWay {
        hub: HubId,
        way: TrafficFault,
        away: Duration,
    },
    AgentKilled {
        away: Duration,
    },
    /// All Helm processes of hub and agent.
    HelmKilled,
    AgentFrozen {
        away: Duration,
    },
    ApiserverKilled {
        edge: Edge,
        away: Duration,
    },
    /// etcd and API server together.
    PowerLost {
        edge: Edge,
        away: Duration,
    },
    /// Between agent and hub.
    Link {
        /// `None` stands for all hubs.
        hub: Option<HubId>,
        way: TrafficFault,
        away: Duration,
    },
    /// Between the actor and its API server.
    Way {
        edge: Edge,
        way: TrafficFault,
        away: Duration,
    },
    Answers {
        edge: Edge,
        answer: ApiserverFault,
        away: Duration,
    },
    /// The Secret of edge-2 contains an invalid kubeconfig.
    Kubeconfig {
        away: Duration,
    },
    /// Changes a chart value in the hub's values file.
    Message {
        number: u32,
    },
    /// Another version of the chart. Each hub is stopped and restarted with it, one after the other.
    Version {
        number: u32,
    },
    Repository {
        how: RepositoryFault,
        away: Duration,
    },
    Crd {
        edge: Edge,
    },
    Created {
        tenant: Tenant,
        workspace: Workspace,
    },
    Deleted {
        tenant: Tenant,
    },
    Recreated {
        tenant: Tenant,
        workspace: Workspace,
    },
    /// Sets the workspace to its current value, if it was unset.
    WorkspaceSet {
        tenant: Tenant,
    },
    Paused {
        tenant: Tenant,
        away: Duration,
    },
    ReleaseDeleted {
        tenant: Tenant,
        all: bool,
    },
    ReleaseDamaged {
        tenant: Tenant,
    },
    ReleaseMarked {
        tenant: Tenant,
        mark: Mark,
    },
    ForeignObject {
        tenant: Tenant,
        number: u32,
    },
    ForeignRelease {
        tenant: Tenant,
        number: u32,
    },
    ForeignFinalizer {
        tenant: Tenant,
    },
    Drift {
        tenant: Tenant,
        object: Object,
        gone: bool,
    },
}

/// The types of faults, without parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    HubKilled,
    HubStopped,
    HubFrozen,
    LeadFrozen,
    HubsKilled,
    HomeWay,
    AgentKilled,
    HelmKilled,
    AgentFrozen,
    ApiserverKilled,
    PowerLost,
    Link,
    Way,
    Answers,
    Kubeconfig,
    Message,
    Version,
    Repository,
    Crd,
    Created,
    Deleted,
    Recreated,
    WorkspaceSet,
    Paused,
    ReleaseDeleted,
    ReleaseDamaged,
    ReleaseMarked,
    ForeignObject,
    ForeignRelease,
    ForeignFinalizer,
    Drift,
}

impl Kind {
    /// Each kind with its relative frequency.
    const ALL: [(Self, u32); 31] = [
        (Self::HubKilled, 3),
        (Self::HubStopped, 2),
        (Self::HubFrozen, 2),
        (Self::LeadFrozen, 3),
        (Self::HubsKilled, 2),
        (Self::HomeWay, 3),
        (Self::AgentKilled, 3),
        (Self::HelmKilled, 5),
        (Self::AgentFrozen, 3),
        (Self::ApiserverKilled, 3),
        (Self::PowerLost, 2),
        (Self::Link, 3),
        (Self::Way, 4),
        (Self::Answers, 6),
        (Self::Kubeconfig, 2),
        (Self::Message, 1),
        (Self::Version, 2),
        (Self::Repository, 2),
        (Self::Crd, 2),
        (Self::Created, 6),
        (Self::Deleted, 5),
        (Self::Recreated, 4),
        (Self::WorkspaceSet, 3),
        (Self::Paused, 2),
        (Self::ReleaseDeleted, 3),
        (Self::ReleaseDamaged, 2),
        (Self::ReleaseMarked, 3),
        (Self::ForeignObject, 2),
        (Self::ForeignRelease, 2),
        (Self::ForeignFinalizer, 2),
        (Self::Drift, 8),
    ];

    /// Returns the kinds that apply to this number of hubs, with their frequencies.
    pub(crate) fn for_hubs(hubs: usize) -> impl Iterator<Item = (Self, u32)> {
        let multi_hub_kinds = [Self::LeadFrozen, Self::HubsKilled, Self::HomeWay];
        Self::ALL
            .into_iter()
            .filter(move |(kind, _)| hubs > 1 || !multi_hub_kinds.contains(kind))
    }

    /// Returns a description.
    pub(crate) fn description(self) -> &'static str {
        match self {
            Self::HubKilled => "hub killed (-9)",
            Self::HubStopped => "hub stopped (SIGTERM)",
            Self::HubFrozen => "hub frozen (SIGSTOP)",
            Self::LeadFrozen => "leader frozen for longer than its Lease",
            Self::HubsKilled => "all hubs killed (-9) together",
            Self::HomeWay => "way of one hub to home cut, slow, half-open or frozen",
            Self::AgentKilled => "agent killed (-9)",
            Self::HelmKilled => "helm killed (-9)",
            Self::AgentFrozen => "agent frozen (SIGSTOP)",
            Self::ApiserverKilled => "apiserver killed (-9)",
            Self::PowerLost => "etcd and apiserver killed (-9)",
            Self::Link => "link of hub and agent cut, slow, half-open or frozen",
            Self::Way => "way to an apiserver cut, slow, half-open or frozen",
            Self::Answers => "403, 404, 410, 429, 500, HTML, empty lists, closed watches",
            Self::Kubeconfig => "kubeconfig Secret replaced by rubbish",
            Self::Message => "values of the chart changed",
            Self::Version => "version of the chart changed, hubs restarted",
            Self::Repository => "chart repository away",
            Self::Crd => "CRD of Tenants deleted",
            Self::Created => "Tenant created",
            Self::Deleted => "Tenant deleted",
            Self::Recreated => "Tenant deleted and created again",
            Self::WorkspaceSet => "workspace of a Tenant set",
            Self::Paused => "Tenant paused",
            Self::ReleaseDeleted => "release Secrets deleted",
            Self::ReleaseDamaged => "release Secret damaged",
            Self::ReleaseMarked => "release marked pending, failed or superseded",
            Self::ForeignObject => "foreign ConfigMap in a workspace",
            Self::ForeignRelease => "foreign release in a workspace",
            Self::ForeignFinalizer => "foreign finalizer on a Tenant",
            Self::Drift => "object of a release edited or deleted",
        }
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

impl Fault {
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::HubKilled { .. } => Kind::HubKilled,
            Self::HubStopped { .. } => Kind::HubStopped,
            Self::HubFrozen { .. } => Kind::HubFrozen,
            Self::LeadFrozen { .. } => Kind::LeadFrozen,
            Self::HubsKilled { .. } => Kind::HubsKilled,
            Self::HomeWay { .. } => Kind::HomeWay,
            Self::AgentKilled { .. } => Kind::AgentKilled,
            Self::HelmKilled => Kind::HelmKilled,
            Self::AgentFrozen { .. } => Kind::AgentFrozen,
            Self::ApiserverKilled { .. } => Kind::ApiserverKilled,
            Self::PowerLost { .. } => Kind::PowerLost,
            Self::Link { .. } => Kind::Link,
            Self::Way { .. } => Kind::Way,
            Self::Answers { .. } => Kind::Answers,
            Self::Kubeconfig { .. } => Kind::Kubeconfig,
            Self::Message { .. } => Kind::Message,
            Self::Version { .. } => Kind::Version,
            Self::Repository { .. } => Kind::Repository,
            Self::Crd { .. } => Kind::Crd,
            Self::Created { .. } => Kind::Created,
            Self::Deleted { .. } => Kind::Deleted,
            Self::Recreated { .. } => Kind::Recreated,
            Self::WorkspaceSet { .. } => Kind::WorkspaceSet,
            Self::Paused { .. } => Kind::Paused,
            Self::ReleaseDeleted { .. } => Kind::ReleaseDeleted,
            Self::ReleaseDamaged { .. } => Kind::ReleaseDamaged,
            Self::ReleaseMarked { .. } => Kind::ReleaseMarked,
            Self::ForeignObject { .. } => Kind::ForeignObject,
            Self::ForeignRelease { .. } => Kind::ForeignRelease,
            Self::ForeignFinalizer { .. } => Kind::ForeignFinalizer,
            Self::Drift { .. } => Kind::Drift,
        }
    }

    /// Returns the target that the fault occupies. Two concurrent faults with the same target would undo each other.
    pub(crate) fn target(&self) -> FaultTarget {
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

    fn hub(&self) -> Option<HubId> {
        match self {
            Self::HubKilled { hub, .. }
            | Self::HubStopped { hub, .. }
            | Self::HubFrozen { hub, .. }
            | Self::HomeWay { hub, .. } => Some(*hub),
            Self::Link { hub, .. } => *hub,
            _ => None,
        }
    }

    pub(crate) fn tenant(&self) -> Option<Tenant> {
        match self {
            Self::Created { tenant, .. }
            | Self::Deleted { tenant }
            | Self::Recreated { tenant, .. }
            | Self::WorkspaceSet { tenant }
            | Self::Paused { tenant, .. }
            | Self::ReleaseDeleted { tenant, .. }
            | Self::ReleaseDamaged { tenant }
            | Self::ReleaseMarked { tenant, .. }
            | Self::ForeignObject { tenant, .. }
            | Self::ForeignRelease { tenant, .. }
            | Self::ForeignFinalizer { tenant }
            | Self::Drift { tenant, .. } => Some(*tenant),
            _ => None,
        }
    }

    pub(crate) fn edge(&self) -> Option<Edge> {
        match self {
            Self::ApiserverKilled { edge, .. }
            | Self::PowerLost { edge, .. }
            | Self::Way { edge, .. }
            | Self::Answers { edge, .. }
            | Self::Crd { edge } => Some(*edge),
            _ => self.tenant().map(Tenant::edge),
        }
    }

    /// Time from the start of the fault until it is repaired.
    pub(crate) fn away(&self) -> Duration {
        match self {
            Self::HubKilled { away, .. }
            | Self::HubStopped { away, .. }
            | Self::HubFrozen { away, .. }
            | Self::LeadFrozen { away }
            | Self::HubsKilled { away }
            | Self::HomeWay { away, .. }
            | Self::AgentKilled { away }
            | Self::AgentFrozen { away }
            | Self::ApiserverKilled { away, .. }
            | Self::PowerLost { away, .. }
            | Self::Link { away, .. }
            | Self::Way { away, .. }
            | Self::Answers { away, .. }
            | Self::Kubeconfig { away }
            | Self::Repository { away, .. }
            | Self::Paused { away, .. } => *away,
            _ => Duration::ZERO,
        }
    }

    /// Time from the start of the fault until its target is free again.
    pub(crate) fn occupied_for(&self) -> Duration {
        let stop_time = match self.kind() {
            Kind::HubStopped => HUB_STOP,
            Kind::Version => ALL_HUBS_STOP,
            _ => Duration::from_secs(3),
        };
        self.away() + stop_time
    }

    /// Time from the start of the fault until Krypton has no back-off or Lease of a dead process to wait for. Excludes
    /// the time for the actual work.
    pub(crate) fn settled_after(&self) -> Duration {
        let settle_time = match self.kind() {
            Kind::HubKilled | Kind::HubsKilled | Kind::AgentKilled => LEASE_EXPIRY,
            // Another process takes over a member when the frozen hub's Lease expires, or when the hub releases it.
            Kind::HubFrozen | Kind::LeadFrozen => {
                MAX_BACKOFF.max(LEASE_EXPIRY.saturating_sub(self.away()))
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
            Kind::Repository => self.away(),
            Kind::Message => ROLLOUT,
            _ => Duration::ZERO,
        };
        self.away() + settle_time
    }
}

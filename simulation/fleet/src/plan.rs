//! The plan of a run: the shape of the fleet, and the actions of people and faults with their times. A plan is a pure
//! function of the seed and has a text form that round-trips.
//!
//! Names: clusters `home`, `edge-1`, ...; hosts `hub-0`, `hub-1`, `agent-edge-1`, ...; Tenants `t0`, ... in the
//! namespace [`TENANT_NAMESPACE`]; the KryptonDeployments `d0` and `d1` there. The member of an edge cluster has the
//! cluster's name.

mod draw;
mod scope;
#[cfg(test)]
mod tests;
mod text;

pub use scope::{Scope, Verbs};
pub use text::ParseError;

use crate::time::Millis;

/// Namespace of Tenants and KryptonDeployments, on each cluster. The stage creates it.
pub const TENANT_NAMESPACE: &str = "tenants";
/// Namespace of the hub and of Krypton's own objects.
pub const SYSTEM_NAMESPACE: &str = "krypton-system";
/// The home cluster.
pub const HOME: &str = "home";
/// Ends the name of a second member with the same cluster.
pub const TWIN_SUFFIX: &str = "-twin";
/// A namespace whose Secrets the hub discovers, but does not trust.
pub const UNTRUSTED_NAMESPACE: &str = "elsewhere";
/// Starts the names of hosts with a copy of an agent.
pub const COPY_PREFIX: &str = "copy-";
/// ConfigMap in the hub's namespace with chart values, in the key `values.yaml`. The hub gets it as
/// `--chart-values-from`.
pub const VALUES_CONFIG_MAP: &str = "fleet-values";
/// The length of a permanent fault.
pub const FOREVER: Millis = Millis::MAX;

/// Shape of the fleet and of the run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Number of hubs, 1 or 2.
    pub hubs: u32,
    pub edges: Vec<Edge>,
    /// The Tenants that exist at the start.
    pub tenants: Vec<PlannedTenant>,
    /// Whether the home cluster is a member, too.
    pub self_cluster: bool,
    /// Whether the clusters have Krypton's CRDs before any program starts, as after a first installation.
    pub crds_exist: bool,
    /// Whether the leader's Lease lasts 15 s, as in other leader elections, instead of the default of 5 s.
    pub long_leader_lease: bool,
    /// Length of the chaos.
    pub chaos: Millis,
    /// How long nothing may happen at the end.
    pub quiet: Millis,
    pub chart: Chart,
    /// A fault from before the start of all programs.
    pub at_start: Option<Action>,
}

/// An edge cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Edge {
    pub name: String,
    pub access: Access,
}

/// The process that acts on a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The agent on the host `agent-<edge>`.
    Agent,
    /// The hub, through a kubeconfig Secret on the home cluster with the name of the edge cluster.
    Kubeconfig,
    /// The agent, and the hub when the agent is away.
    Both,
}

/// A Tenant of the plan and its cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedTenant {
    pub name: String,
    /// The cluster on which people write the Tenant.
    pub cluster: String,
    /// The member that `clusterRef` names, if the hub places the Tenant.
    pub placed_on: Option<String>,
}

/// The chart that the fleet installs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Chart {
    #[default]
    Plain,
    /// With hooks before and after.
    Hooks,
    /// The hook of each upgrade fails in the even versions.
    FailingUpgrade,
    /// Its hooks take 20 seconds.
    Slow,
}

/// A complete run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub seed: u64,
    pub settings: Settings,
    /// In the order of their times.
    pub steps: Vec<PlanStep>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanStep {
    /// Time since the start of the chaos.
    pub at: Millis,
    pub action: Action,
}

/// An action of a user, or a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    Tenant {
        cluster: String,
        tenant: String,
        action: TenantAction,
    },
    Member {
        member: String,
        action: MemberAction,
    },
    Deployment {
        name: String,
        action: DeploymentAction,
    },
    /// Changes the chart's version in the hub's flags, one hub after the other. See [`crate::chart::version_in`].
    ChartVersion { version: u32 },
    /// Changes the fleet's values in the ConfigMap [`VALUES_CONFIG_MAP`].
    Values { number: u32 },
    /// Requests a rotation of the hub's CA.
    RotateCa,
    /// Deletes the CRD of Tenants.
    DeleteCrd { cluster: String },
    /// Deletes another CRD of Krypton on the home cluster.
    DeleteHomeCrd { resource: String },
    /// Deletes Krypton's anchor on a cluster.
    DeleteAnchor { cluster: String },
    /// Deletes the ConfigMap with the hub's epoch.
    DeleteEpoch,
    /// SIGKILL.
    Crash { host: String, restart: Millis },
    /// SIGTERM. The program starts again after this time, or later once it has ended.
    Stop { host: String, length: Millis },
    /// Happens when the host sends its `nth` request from now.
    AtRequest {
        host: String,
        nth: u32,
        fault: RequestFault,
    },
    /// SIGSTOP, then SIGCONT.
    Freeze { host: String, length: Millis },
    /// Suspends the machine.
    Suspend { host: String, length: Millis },
    /// Starts a copy of an agent, with its identity and its name, for a time.
    CopyAgent { edge: String, length: Millis },
    /// Replaces an agent for a time by one that lies to the hub, with the same credentials.
    HostileAgent { edge: String, length: Millis },
    /// Moves the wall clock of a host.
    Skew { host: String, by: i64 },
    /// Moves all wall clocks until certificates become due or expire.
    PassDays { days: u32 },
    Link {
        from: String,
        to: String,
        bidirectional: bool,
        fault: LinkFault,
        length: Millis,
    },
    /// The open connections lose all later bytes in this direction. Neither end notices, and new connections work.
    HalfOpen { from: String, to: String },
    Server {
        cluster: String,
        fault: ServerFault,
        scope: Scope,
        length: Millis,
    },
    /// Ends all watches of an API server.
    EndWatches { cluster: String },
    /// Removes the watch history of an API server.
    Compact { cluster: String },
    /// Takes a snapshot of etcd, and restores it after this time.
    Restore { cluster: String, after: Millis },
    /// Moves the clock of an API server for a time.
    ServerClock {
        cluster: String,
        by: i64,
        length: Millis,
    },
}

/// An action of a user on a Tenant or its release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TenantAction {
    /// Creates it, with `clusterRef` if a member is given.
    Create {
        placed_on: Option<String>,
    },
    /// Changes its values.
    Edit {
        number: u32,
    },
    Delete,
    /// Sets the annotation that keeps the release, then deletes the Tenant.
    Orphan,
    Relabel {
        number: u32,
    },
    Pause,
    Resume,
    /// Requests a retry.
    Retry {
        number: u32,
    },
    AddForeign,
    RemoveForeign,
    /// Deletes the newest release Secret.
    DeleteRelease,
    /// Replaces the content of the newest release Secret, which nothing can decode afterwards.
    DamageRelease,
    /// Copies the newest release Secret to the next revision.
    ForgeRelease,
    /// Deletes the namespace of the release.
    DeleteNamespace,
    /// Deletes the first object of the release.
    DeleteObject,
    /// Creates an object of a user in the workspace.
    AddOccupant,
    /// Changes `clusterRef`.
    SetClusterRef {
        member: String,
    },
    /// Replaces the whole object but its status, as `kubectl replace` does.
    Rewrite {
        member: String,
    },
    /// Lets it adopt the release of an earlier Tenant.
    Adopt,
}

/// An action of a user on a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberAction {
    Pause,
    Resume,
    Ban,
    Unban,
    /// Deletes the EdgeCluster.
    Delete {
        uninstall: bool,
    },
    /// Sets the effect of its deletion on the releases.
    Policy {
        uninstall: bool,
    },
    /// Sets the annotation that keeps the releases.
    Orphan,
    /// Allows only this namespace, or all.
    Allow {
        namespace: Option<String>,
    },
    /// Builds the cluster again, without any object and with another UID. Its agent stops.
    Rebuild,
    /// Accepts the cluster that has the name now, with `kubectl krypton join --replace`.
    Replace,
    /// Gives the agent a new join bundle, and restarts it.
    Rejoin,
    /// Creates a second Secret with a kubeconfig for the cluster, with this member's name and [`TWIN_SUFFIX`], and
    /// deletes it and its EdgeCluster after a time.
    AddTwin {
        length: Millis,
    },
    /// Creates two Secrets with kubeconfigs in the namespace [`UNTRUSTED_NAMESPACE`] for a time. One has the member's
    /// name, the other a new name that people do not accept.
    AddElsewhere {
        length: Millis,
    },
    /// Replaces the kubeconfig by invalid text for a time.
    DamageKubeconfig {
        length: Millis,
    },
    /// Deletes the Secret with the kubeconfig, and creates it again after a time.
    DeleteKubeconfig {
        length: Millis,
    },
    /// Sets the discovery label to `false` for a time.
    RelabelKubeconfig {
        length: Millis,
    },
}

/// An action of a user on a KryptonDeployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeploymentAction {
    Create {
        region: String,
    },
    /// Changes the account's name.
    Edit {
        number: u32,
    },
    Move {
        region: String,
    },
    Delete,
    /// Sets the annotation that keeps the release, then deletes it.
    Orphan,
}

/// A fault at one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestFault {
    /// SIGKILL of the host's program. The API server still gets the request.
    Crash { restart: Millis },
    /// The connection breaks before the API server gets the request.
    Fail,
    /// The connection breaks after the API server has carried out the request.
    LoseResponse,
}

/// A fault of one direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkFault {
    Cut,
    Refuse,
    /// In milliseconds.
    Delay(Millis),
    /// Per thousand.
    Loss(u32),
}

/// A fault of an API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerFault {
    Down,
    Hangs,
    TooManyRequests,
    InternalError,
    Unavailable,
    /// An HTML page with status 200, as from a captive portal.
    Html,
    Unauthorized,
    Forbidden,
    NotFound,
    Gone,
    /// An HTML page of a proxy before the API server.
    BadGateway,
    /// Lists have no objects.
    EmptyLists,
    /// The connection ends in the middle of each body.
    CutBodies,
    /// The API server is well, but the pods of Jobs fail, as without a registry.
    FailingJobs,
}

impl Settings {
    /// Time for which the leader's Lease is valid without a renewal.
    pub fn leader_lease(&self) -> Millis {
        match self.long_leader_lease {
            true => 15_000,
            false => 5_000,
        }
    }

    /// Names of all clusters, the home cluster first.
    pub fn clusters(&self) -> Vec<String> {
        let edges = self.edges.iter().map(|edge| edge.name.clone());
        std::iter::once(HOME.to_owned()).chain(edges).collect()
    }

    /// Names of all hosts, hubs first.
    pub fn hosts(&self) -> Vec<String> {
        let hubs = (0..self.hubs).map(|number| format!("hub-{number}"));
        let agents = self.edges.iter().filter_map(Edge::agent_host);
        hubs.chain(agents).collect()
    }

    /// The Helm member name of a cluster.
    pub fn member_for(cluster: &str) -> &str {
        match cluster {
            HOME => krypton_types::names::SELF_CLUSTER,
            edge => edge,
        }
    }

    /// The cluster of a member.
    pub fn cluster_for(member: &str) -> &str {
        match member {
            krypton_types::names::SELF_CLUSTER => HOME,
            edge => edge,
        }
    }
}

impl Edge {
    /// Host of the agent.
    pub fn agent_host(&self) -> Option<String> {
        (self.access != Access::Kubeconfig).then(|| format!("agent-{}", self.name))
    }

    /// Whether home has a Secret with a kubeconfig for it.
    pub fn has_kubeconfig(&self) -> bool {
        self.access != Access::Agent
    }
}

impl Plan {
    /// Draws the plan of a seed.
    pub fn new(seed: u64) -> Self {
        draw::plan(seed, &draw::FULL)
    }

    /// Draws a plan for one edge cluster with few Tenants and a short chaos.
    pub fn short(seed: u64) -> Self {
        draw::plan(seed, &draw::SHORT)
    }

    /// The member that a permanent fault keeps from converging.
    pub fn separated_member(&self) -> Option<&str> {
        self.steps
            .iter()
            .filter(|step| step.action.length() == Some(FOREVER))
            .filter(|step| !self.hub_replaces_agent(&step.action))
            .find_map(|step| step.action.affected_edge())
    }

    /// Whether a fault concerns an agent only, and the hub has a kubeconfig for its cluster.
    fn hub_replaces_agent(&self, action: &Action) -> bool {
        let names = action.required_names();
        let mut edges = self.settings.edges.iter();
        names.iter().all(|name| is_host(name))
            && edges.any(|edge| {
                let agent = edge.agent_host().filter(|_| edge.has_kubeconfig());
                agent.is_some_and(|agent| names.contains(&agent.as_str()))
            })
    }

    /// Whether no hub remains at the end.
    pub fn loses_all_hubs(&self) -> bool {
        let is_lost = |hub: String| {
            let mut steps = self.steps.iter();
            steps.any(|step| {
                step.action.length() == Some(FOREVER)
                    && step.action.required_names() == [hub.as_str()]
            })
        };
        (0..self.settings.hubs).all(|number| is_lost(format!("hub-{number}")))
    }
}

impl Action {
    /// Whether people act, not the infrastructure.
    pub fn is_user_action(&self) -> bool {
        matches!(
            self,
            Self::Tenant { .. }
                | Self::Member { .. }
                | Self::Deployment { .. }
                | Self::ChartVersion { .. }
                | Self::Values { .. }
                | Self::RotateCa
                | Self::DeleteCrd { .. }
                | Self::DeleteHomeCrd { .. }
                | Self::DeleteAnchor { .. }
                | Self::DeleteEpoch
        )
    }

    /// The time after which clients notice the fault at the latest, if it has no end.
    pub fn detection_delay(&self) -> Millis {
        match self {
            // The timeout of a watch, with the clients' tolerance.
            Self::HalfOpen { from, .. } if !is_host(from) => 330_000,
            // Pings find it, and a hub ends the session of a silent agent.
            Self::HalfOpen { .. } => 60_000,
            _ => 0,
        }
    }

    /// The time until the fault ends. `None` if it has no length.
    pub fn length(&self) -> Option<Millis> {
        self.clone().length_mut().copied()
    }

    /// The same action with another length.
    #[must_use]
    pub fn with_length(&self, new_length: Millis) -> Self {
        let mut action = self.clone();
        if let Some(length) = action.length_mut() {
            *length = new_length;
        }
        action
    }

    fn length_mut(&mut self) -> Option<&mut Millis> {
        match self {
            Self::Crash {
                restart: length, ..
            }
            | Self::AtRequest {
                fault: RequestFault::Crash { restart: length },
                ..
            }
            | Self::Stop { length, .. }
            | Self::Freeze { length, .. }
            | Self::Suspend { length, .. }
            | Self::CopyAgent { length, .. }
            | Self::HostileAgent { length, .. }
            | Self::Link { length, .. }
            | Self::Server { length, .. }
            | Self::Restore { after: length, .. }
            | Self::ServerClock { length, .. }
            | Self::Member {
                action:
                    MemberAction::AddTwin { length }
                    | MemberAction::AddElsewhere { length }
                    | MemberAction::DamageKubeconfig { length }
                    | MemberAction::DeleteKubeconfig { length }
                    | MemberAction::RelabelKubeconfig { length },
                ..
            } => Some(length),
            _ => None,
        }
    }

    /// Names of the clusters and hosts, and of the Tenant, that the action needs.
    pub fn required_names(&self) -> Vec<&str> {
        match self {
            Self::Tenant {
                cluster,
                tenant,
                action,
            } => {
                let mut names = vec![cluster.as_str(), tenant.as_str()];
                match action {
                    // The action creates the Tenant.
                    TenantAction::Create { placed_on } => {
                        names.pop();
                        names.extend(placed_on.as_deref());
                    }
                    TenantAction::SetClusterRef { member } | TenantAction::Rewrite { member } => {
                        names.push(member);
                    }
                    _ => {}
                }
                names
            }
            Self::Member { member, .. } => vec![Settings::cluster_for(member)],
            Self::Deployment { action, .. } => match action {
                DeploymentAction::Create { region } | DeploymentAction::Move { region } => {
                    vec![region]
                }
                DeploymentAction::Edit { .. }
                | DeploymentAction::Delete
                | DeploymentAction::Orphan => Vec::new(),
            },
            Self::ChartVersion { .. }
            | Self::Values { .. }
            | Self::RotateCa
            | Self::DeleteHomeCrd { .. }
            | Self::DeleteEpoch
            | Self::PassDays { .. } => Vec::new(),
            Self::CopyAgent { edge, .. } | Self::HostileAgent { edge, .. } => vec![edge],
            Self::Link { from, to, .. } | Self::HalfOpen { from, to } => vec![from, to],
            Self::Crash { host, .. }
            | Self::AtRequest { host, .. }
            | Self::Stop { host, .. }
            | Self::Freeze { host, .. }
            | Self::Suspend { host, .. }
            | Self::Skew { host, .. } => vec![host],
            Self::DeleteCrd { cluster }
            | Self::DeleteAnchor { cluster }
            | Self::Server { cluster, .. }
            | Self::EndWatches { cluster }
            | Self::Compact { cluster }
            | Self::Restore { cluster, .. }
            | Self::ServerClock { cluster, .. } => vec![cluster],
        }
    }

    /// Whether the action is on the Tenant of this name, or creates it.
    pub fn targets_tenant(&self, name: &str) -> bool {
        matches!(self, Self::Tenant { tenant, .. } if tenant == name)
    }

    /// The edge cluster that a fault separates or stops.
    fn affected_edge(&self) -> Option<&str> {
        let names = self.required_names().into_iter();
        let mut edges = names.map(|name| name.strip_prefix("agent-").unwrap_or(name));
        edges.find(|name| name.starts_with("edge-"))
    }
}

/// Whether this is the name of a host, and not of a cluster.
fn is_host(name: &str) -> bool {
    name.starts_with("hub-") || name.starts_with("agent-")
}

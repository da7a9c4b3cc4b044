//! What is said of a Tenant: conditions per member, the phase, and the summary over all members.

use std::collections::BTreeMap;
use std::fmt;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use serde::{Deserialize, Serialize};

mod summary;

pub use summary::{Phase, READY, Standing, Summary, Tally, phase, summarise, summarise_many};

/// Reasons, as they stand in `conditions[].reason`.
pub mod reason {
    // Of the original (reference 1.5).
    pub const INSTALLED: &str = "Installed";
    pub const UPGRADED: &str = "Upgraded";
    pub const NO_CHANGE: &str = "NoChange";
    pub const INSTALL_FAILED: &str = "InstallFailed";
    pub const UPGRADE_FAILED: &str = "UpgradeFailed";
    pub const CHART_NOT_LOADED: &str = "ChartNotLoaded";
    pub const VERSION_NOT_FOUND: &str = "VersionNotFound";
    pub const VERSION_INVALID: &str = "VersionInvalid";
    pub const INSTALLING: &str = "Installing";
    pub const UPGRADING: &str = "Upgrading";
    pub const DELETING: &str = "Deleting";
    pub const INSTALL_COMPLETE: &str = "InstallComplete";
    pub const UPGRADE_COMPLETE: &str = "UpgradeComplete";

    // Ours, of one member.
    pub const NO_ERROR: &str = "NoError";
    pub const NOT_READY: &str = "NotReady";
    pub const NOT_THIS_CLUSTER: &str = "NotThisCluster";
    /// Nothing has the name by which a member is named.
    pub const CLUSTER_NOT_FOUND: &str = "ClusterNotFound";
    pub const NAMESPACE_NOT_ALLOWED: &str = "NamespaceNotAllowed";
    pub const RELEASE_IN_USE: &str = "ReleaseInUse";
    /// The stored release is not what Krypton deployed.
    pub const RELEASE_TAMPERED: &str = "ReleaseTampered";
    pub const NAMESPACE_NOT_OWNED: &str = "NamespaceNotOwned";
    pub const WORKSPACE_INVALID: &str = "WorkspaceInvalid";
    pub const WORKSPACE_TERMINATING: &str = "WorkspaceTerminating";
    pub const PAUSED: &str = "Paused";
    pub const CLUSTER_UNREACHABLE: &str = "ClusterUnreachable";
    pub const UNINSTALL_FAILED: &str = "UninstallFailed";
    pub const LOCKED: &str = "Locked";
    /// It was a member when this Tenant was last reported from there, and is none now.
    pub const MEMBER_LEFT: &str = "MemberLeft";
    /// The member says all it has, and this Tenant is not among it any more.
    pub const TENANT_GONE: &str = "TenantGone";
    /// The member leaves the fleet, and this release is gone.
    pub const UNINSTALLED: &str = "Uninstalled";
    /// An upgrade failed for good, and the last good revision could not be put back.
    pub const ROLLBACK_FAILED: &str = "RollbackFailed";
    /// The cluster takes no writes for now, as its owner wishes it. No failure.
    pub const SUSPENDED: &str = "Suspended";
    /// Helm could not be begun: not there, of another version, no room for its files.
    pub const HELM_UNAVAILABLE: &str = "HelmUnavailable";
    /// The API server of the member refuses a request of Krypton.
    pub const REQUEST_REFUSED: &str = "RequestRefused";
    /// The Tenant has values of its own, and the fleet does not take any.
    pub const VALUES_NOT_ALLOWED: &str = "ValuesNotAllowed";
    /// With the Tenant's own, the values are more than a member holds.
    pub const VALUES_TOO_LARGE: &str = "ValuesTooLarge";
    // Of the condition `Placed`.
    pub const PLACED: &str = "Placed";
    /// A Tenant of that name that is not home's is there; it is mirrored, and left alone.
    pub const ALREADY_THERE: &str = "AlreadyThere";
    /// A Tenant that was placed for another object of home.
    pub const BELONGS_TO_ANOTHER: &str = "BelongsToAnother";
    pub const NAMESPACE_TERMINATING: &str = "NamespaceTerminating";
    pub const FORBIDDEN: &str = "Forbidden";
    pub const NOT_ADMITTED: &str = "NotAdmitted";
    /// The write did not come through; it is tried again.
    pub const NOT_WRITTEN: &str = "NotWritten";
    /// It was placed elsewhere before.
    pub const CLUSTER_REF_CHANGED: &str = "ClusterRefChanged";
    /// The hub was told not to place Tenants any more.
    pub const NOT_PLACING: &str = "NotPlacing";
    /// The order is given, or will be.
    pub const ORDERED: &str = "Ordered";
    pub const TOO_MANY: &str = "TooMany";

    /// Written in the place of a reason that the apiserver would refuse.
    pub const UNSPECIFIED: &str = "Unspecified";

    // Of the condition `Ready`, over all members.
    pub const ALL_CLUSTERS_READY: &str = "AllClustersReady";
    pub const CLUSTERS_NOT_READY: &str = "ClustersNotReady";
    pub const CLUSTERS_UNKNOWN: &str = "ClustersUnknown";
    pub const NO_CLUSTERS: &str = "NoClusters";

    /// Whether the chart could not be fetched: what `ALLOW_CHART_SKIP` forgives.
    pub fn is_chart_fetch(reason: &str) -> bool {
        matches!(
            reason,
            CHART_NOT_LOADED | VERSION_NOT_FOUND | VERSION_INVALID
        )
    }
}

/// Condition of an EdgeCluster, and of what names it: whether the cluster can be had (reference 2.1).
pub const TARGET_RESOLVED: &str = "TargetClusterResolved";

/// Condition of a Tenant at home that names another member: whether it is placed there.
pub const PLACED: &str = "Placed";

/// Longest message that we write, in bytes. The API's own limit is 32 KiB.
pub const MESSAGE_MAX: usize = 1024;

/// `conditions[].status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Truth {
    True,
    False,
    Unknown,
}

impl Truth {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::True => "True",
            Self::False => "False",
            Self::Unknown => "Unknown",
        }
    }

    /// A status that is none of the three says nothing: Unknown.
    pub fn of_status(status: &str) -> Self {
        match status {
            "True" => Self::True,
            "False" => Self::False,
            _ => Self::Unknown,
        }
    }
}

impl fmt::Display for Truth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One condition without its type and its times.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    pub truth: Truth,
    /// CamelCase, one of [`reason`].
    pub reason: String,
    pub message: String,
}

impl State {
    /// With reason and message cut to so many bytes each; a reason that is longer is no word.
    #[must_use]
    pub fn within(&self, reason: usize, message: usize) -> Self {
        let kept = Some(&self.reason).filter(|text| text.len() <= reason);
        let end = self.message.floor_char_boundary(message);
        Self {
            truth: self.truth,
            reason: kept
                .map_or(self::reason::UNSPECIFIED, String::as_str)
                .to_owned(),
            message: self.message.get(..end).unwrap_or_default().to_owned(),
        }
    }

    pub fn new(truth: Truth, reason: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            truth,
            reason: reason.into(),
            message: message.into(),
        }
    }

    fn of(condition: &Condition) -> Self {
        Self::new(
            Truth::of_status(&condition.status),
            condition.reason.clone(),
            condition.message.clone(),
        )
    }
}

/// What one member says of one Tenant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterState {
    pub ready: State,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<State>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<State>,
}

impl ClusterState {
    /// The member has this Tenant no more: shown for a while, and not counted.
    pub fn has_departed(&self) -> bool {
        matches!(
            self.ready.reason.as_str(),
            reason::MEMBER_LEFT | reason::TENANT_GONE
        )
    }
}

/// Which of a member's conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Ready,
    Progress,
    Error,
}

impl Kind {
    fn prefix(self) -> &'static str {
        match self {
            Self::Ready => "ClusterReady/",
            Self::Progress => "ClusterProgress/",
            Self::Error => "ClusterError/",
        }
    }
}

/// `ClusterReady/<cluster>` and so on (reference 1.5).
pub fn condition_type(kind: Kind, cluster: &str) -> String {
    format!("{}{cluster}", kind.prefix())
}

/// The reverse of [`condition_type`]; None for any other condition type.
pub fn parse_condition_type(condition_type: &str) -> Option<(Kind, &str)> {
    [Kind::Ready, Kind::Progress, Kind::Error]
        .into_iter()
        .find_map(|kind| {
            let cluster = condition_type.strip_prefix(kind.prefix())?;
            (!cluster.is_empty()).then_some((kind, cluster))
        })
}

/// Makes the three conditions of `cluster` say what `state` says, and removes what it leaves out.
/// All other conditions, and the order, stay. Returns whether anything changed.
pub fn set_cluster(
    conditions: &mut Vec<Condition>,
    cluster: &str,
    state: &ClusterState,
    observed_generation: i64,
    now: Timestamp,
) -> bool {
    let parts = [
        (Kind::Ready, Some(&state.ready)),
        (Kind::Progress, state.progress.as_ref()),
        (Kind::Error, state.error.as_ref()),
    ];
    let mut changed = false;
    for (kind, part) in parts {
        let type_ = condition_type(kind, cluster);
        changed |= match part {
            Some(part) => set(conditions, &type_, part, observed_generation, now),
            None => remove(conditions, &type_),
        };
    }
    changed
}

/// Makes the condition `type_` say what `state` says, adding it at the end when it is new.
/// `lastTransitionTime` becomes `now` only when the status changes. The message is cut to
/// [`MESSAGE_MAX`] bytes. Returns whether anything changed.
pub fn set(
    conditions: &mut Vec<Condition>,
    type_: &str,
    state: &State,
    generation: i64,
    now: Timestamp,
) -> bool {
    let mut next = Condition {
        type_: type_.to_owned(),
        status: state.truth.as_str().to_owned(),
        reason: legal_reason(&state.reason).to_owned(),
        message: cut(state.message.clone()),
        observed_generation: Some(generation),
        last_transition_time: Time(now),
    };
    let Some(present) = conditions
        .iter_mut()
        .find(|condition| condition.type_ == type_)
    else {
        conditions.push(next);
        return true;
    };
    if present.status == next.status {
        next.last_transition_time = present.last_transition_time.clone();
    }
    let changed = *present != next;
    if changed {
        *present = next;
    }
    changed
}

/// What the condition `type_` says.
pub fn find(conditions: &[Condition], type_: &str) -> Option<State> {
    let found = conditions.iter().find(|found| found.type_ == type_);
    found.map(State::of)
}

/// Takes the condition `type_` away; says whether it was there.
pub fn remove(conditions: &mut Vec<Condition>, type_: &str) -> bool {
    let before = conditions.len();
    conditions.retain(|condition| condition.type_ != type_);
    conditions.len() != before
}

/// What the conditions say of each member. A member of which only progress or an error is on
/// record, as the original left it, is not known to be ready.
pub fn clusters(conditions: &[Condition]) -> BTreeMap<String, ClusterState> {
    let mut clusters: BTreeMap<String, ClusterState> = BTreeMap::new();
    for condition in conditions {
        let Some((kind, cluster)) = parse_condition_type(&condition.type_) else {
            continue;
        };
        let entry = clusters
            .entry(cluster.to_owned())
            .or_insert_with(|| ClusterState {
                ready: State::new(Truth::Unknown, reason::NOT_READY, ""),
                progress: None,
                error: None,
            });
        let state = State::of(condition);
        match kind {
            Kind::Ready => entry.ready = state,
            Kind::Progress => entry.progress = Some(state),
            Kind::Error => entry.error = Some(state),
        }
    }
    clusters
}

/// One illegal reason would make the apiserver refuse the whole status, other members' too.
fn legal_reason(reason: &str) -> &str {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    let bytes = reason.as_bytes();
    let legal = bytes.len() <= 1024
        && bytes.first().is_some_and(u8::is_ascii_alphabetic)
        && bytes.last().is_some_and(|byte| word(*byte))
        && bytes
            .iter()
            .all(|byte| word(*byte) || matches!(byte, b',' | b':'));
    if legal { reason } else { reason::UNSPECIFIED }
}

fn cut(mut message: String) -> String {
    message.truncate(message.floor_char_boundary(MESSAGE_MAX));
    message
}

#[cfg(test)]
mod tests;

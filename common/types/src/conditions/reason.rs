//! Reasons of conditions, as in `conditions[].reason`.

use super::Truth;

// Reasons for Tenants and KryptonDeployments that krypton-operator uses too.
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

// Reasons for one member that only Krypton uses.
pub const NO_ERROR: &str = "NoError";
pub const NOT_READY: &str = "NotReady";
pub const NOT_THIS_CLUSTER: &str = "NotThisCluster";
/// No EdgeCluster has the name by which the object names a member.
pub const CLUSTER_NOT_FOUND: &str = "ClusterNotFound";
pub const NAMESPACE_NOT_ALLOWED: &str = "NamespaceNotAllowed";
pub const RELEASE_IN_USE: &str = "ReleaseInUse";
/// The stored release is not the one that Krypton deployed.
pub const RELEASE_TAMPERED: &str = "ReleaseTampered";
pub const NAMESPACE_NOT_OWNED: &str = "NamespaceNotOwned";
pub const WORKSPACE_INVALID: &str = "WorkspaceInvalid";
pub const WORKSPACE_TERMINATING: &str = "WorkspaceTerminating";
pub const PAUSED: &str = "Paused";
pub const CLUSTER_UNREACHABLE: &str = "ClusterUnreachable";
pub const UNINSTALL_FAILED: &str = "UninstallFailed";
pub const LOCKED: &str = "Locked";
/// The cluster was a member when it last reported this Tenant, and is no longer one.
pub const MEMBER_LEFT: &str = "MemberLeft";
/// The member has sent a full report, and this Tenant is no longer part of it.
pub const TENANT_GONE: &str = "TenantGone";
/// The member is being decommissioned, and this release is uninstalled.
pub const UNINSTALLED: &str = "Uninstalled";
/// An upgrade failed permanently, and the rollback to the last good revision failed.
pub const ROLLBACK_FAILED: &str = "RollbackFailed";
/// The cluster's owner has suspended writes. This is not an error.
pub const SUSPENDED: &str = "Suspended";
/// Krypton cannot compare the release of a KryptonDeployment with its chart.
pub const HEALTH_CHECK_FAILED: &str = "HealthCheckFailed";
/// Helm could not be started: it is missing, has another version, or has no space for its files.
pub const HELM_UNAVAILABLE: &str = "HelmUnavailable";
/// The member's API server rejects a request from Krypton.
pub const REQUEST_REFUSED: &str = "RequestRefused";
/// The Tenant has its own values, and the fleet does not allow them.
pub const VALUES_NOT_ALLOWED: &str = "ValuesNotAllowed";
/// Together with the Tenant's own values, the values exceed the limit of a member.
pub const VALUES_TOO_LARGE: &str = "ValuesTooLarge";
// Reasons of the condition `Placed`.
pub const PLACED: &str = "Placed";
/// A Tenant of that name exists that the home cluster has not placed. It is mirrored and not changed.
pub const ALREADY_THERE: &str = "AlreadyThere";
/// The Tenant was placed for another object of the home cluster.
pub const BELONGS_TO_ANOTHER: &str = "BelongsToAnother";
pub const NAMESPACE_TERMINATING: &str = "NamespaceTerminating";
pub const FORBIDDEN: &str = "Forbidden";
pub const NOT_ADMITTED: &str = "NotAdmitted";
/// The write failed and will be retried.
pub const NOT_WRITTEN: &str = "NotWritten";
/// The Tenant is placed on another cluster.
pub const CLUSTER_REF_CHANGED: &str = "ClusterRefChanged";
/// Placing Tenants is disabled on the hub.
pub const NOT_PLACING: &str = "NotPlacing";
/// The hub has sent the order to the member, or will send it.
pub const ORDERED: &str = "Ordered";
pub const TOO_MANY: &str = "TooMany";

/// Replaces a reason that the API server would reject.
pub const UNSPECIFIED: &str = "Unspecified";

// Reasons of the condition `Ready`, over all members.
pub const ALL_CLUSTERS_READY: &str = "AllClustersReady";
pub const CLUSTERS_NOT_READY: &str = "ClustersNotReady";
pub const CLUSTERS_UNKNOWN: &str = "ClustersUnknown";
pub const NO_CLUSTERS: &str = "NoClusters";

/// Returns whether the chart could not be fetched, which `ALLOW_CHART_SKIP` tolerates.
pub fn is_chart_fetch(reason: &str) -> bool {
    matches!(
        reason,
        CHART_NOT_LOADED | VERSION_NOT_FOUND | VERSION_INVALID
    )
}

// Reasons of EdgeClusters.
pub const RESOLVED: &str = "Resolved";
pub const KUBECONFIG_INVALID: &str = "KubeconfigInvalid";
/// Its source awaits approval by an operator.
pub const NOT_ACCEPTED: &str = "NotAccepted";
pub const SOURCE_GONE: &str = "SourceGone";
/// Another source has the member name.
pub const NAME_TAKEN: &str = "NameTaken";
/// The requested member name is not a valid name.
pub const NOT_A_NAME: &str = "NotAName";
/// The namespace of the KryptonDeployment may not use the Secret.
pub const SECRET_NOT_ALLOWED: &str = "SecretNotAllowed";
pub const SOURCE_UNAVAILABLE: &str = "SourceUnavailable";
/// Its cluster is still being created.
pub const SOURCE_NOT_READY: &str = "SourceNotReady";
/// The Knative operator uses the next nine reasons too.
pub const PROFILE_NOT_FOUND: &str = "ClusterProfileNotFound";
pub const PROFILE_NOT_READY: &str = "ClusterProfileNotReady";
pub const PROFILE_UNAVAILABLE: &str = "ClusterProfileUnavailable";
pub const ACCESS_FAILED: &str = "AccessProviderFailed";
pub const MULTICLUSTER_DISABLED: &str = "MulticlusterDisabled";
pub const PROVIDER_NOT_CONFIGURED: &str = "AccessProviderNotConfigured";
pub const CLUSTER_STALE: &str = "RemoteClusterStale";
pub const PROVIDER_CLOSED: &str = "ClusterProviderClosed";
pub const CLIENT_FAILED: &str = "RemoteClientCreationFailed";

/// Returns the status of `TargetClusterResolved` for a source without current access. The reasons that the Knative
/// operator documents are False.
pub fn source_truth(reason: &str) -> Truth {
    match reason {
        STARTING | SOURCE_UNAVAILABLE => Truth::Unknown,
        _ => Truth::False,
    }
}

pub const CONNECTED: &str = "Connected";
pub const CONNECTING: &str = "Connecting";
pub const UNREACHABLE: &str = "Unreachable";
/// A response of its API server exceeds the hub's size limit.
pub const LIMIT_EXCEEDED: &str = "ResponseLimitExceeded";
pub const BANNED: &str = "Banned";
pub const DUPLICATE: &str = "DuplicateCluster";
pub const RENAMED: &str = "ClusterRenamed";
pub const IDENTITY_CHANGED: &str = "ClusterIdentityChanged";
pub const RECONCILING: &str = "Reconciling";
pub const OBSERVING: &str = "Observing";
pub const STARTING: &str = "Starting";
pub const STALE: &str = "StaleDesiredState";
/// Tenants wait to be restored after the deletion of their CRD.
pub const NOT_RESTORED: &str = "TenantsNotRestored";
pub const BY_AGENT: &str = "ByAgent";
pub const AGENT_AWAY: &str = "AgentAway";
pub const UNINSTALLING: &str = "Uninstalling";
pub const UNINSTALL_WAITS: &str = "UninstallWaits";
/// A ConfigMap, a Secret or a key does not exist.
pub const VALUES_MISSING: &str = "ValuesMissing";
pub const VALUES_INVALID: &str = "ValuesInvalid";
pub const NAMESPACES_INVALID: &str = "NamespaceConfigurationInvalid";
/// The values could not be read yet.
pub const VALUES_UNREAD: &str = "ValuesUnread";

/// The agent's clock agrees with the hub's.
pub const CLOCKS_AGREE: &str = "ClocksAgree";
pub const CLOCK_DIFFERS: &str = "ClockDiffers";

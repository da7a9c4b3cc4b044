//! Reasons, as they stand in `conditions[].reason`.

// Of Tenants and KryptonDeployments.
// Of the original.
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

// Of EdgeClusters.
pub const RESOLVED: &str = "Resolved";
pub const KUBECONFIG_INVALID: &str = "KubeconfigInvalid";
/// Its source waits for an operator.
pub const NOT_ACCEPTED: &str = "NotAccepted";
pub const SOURCE_GONE: &str = "SourceGone";
pub const SOURCE_UNAVAILABLE: &str = "SourceUnavailable";
/// Its cluster is still being made.
pub const SOURCE_NOT_READY: &str = "SourceNotReady";
/// The next nine are the Knative operator's, for its users.
pub const PROFILE_NOT_FOUND: &str = "ClusterProfileNotFound";
pub const PROFILE_NOT_READY: &str = "ClusterProfileNotReady";
pub const PROFILE_UNAVAILABLE: &str = "ClusterProfileUnavailable";
pub const ACCESS_FAILED: &str = "AccessProviderFailed";
pub const MULTICLUSTER_DISABLED: &str = "MulticlusterDisabled";
pub const PROVIDER_NOT_CONFIGURED: &str = "AccessProviderNotConfigured";
pub const CLUSTER_STALE: &str = "RemoteClusterStale";
pub const PROVIDER_CLOSED: &str = "ClusterProviderClosed";
pub const CLIENT_FAILED: &str = "RemoteClientCreationFailed";
pub const CONNECTED: &str = "Connected";
pub const CONNECTING: &str = "Connecting";
pub const UNREACHABLE: &str = "Unreachable";
/// Its API server answers more than the hub reads.
pub const LIMIT_EXCEEDED: &str = "ResponseLimitExceeded";
pub const BANNED: &str = "Banned";
pub const DUPLICATE: &str = "DuplicateCluster";
pub const RENAMED: &str = "ClusterRenamed";
pub const IDENTITY_CHANGED: &str = "ClusterIdentityChanged";
pub const RECONCILING: &str = "Reconciling";
pub const OBSERVING: &str = "Observing";
pub const STARTING: &str = "Starting";
pub const STALE: &str = "StaleDesiredState";
/// Tenants wait to be put back after the deletion of their CRD.
pub const NOT_RESTORED: &str = "TenantsNotRestored";
pub const BY_AGENT: &str = "ByAgent";
pub const AGENT_AWAY: &str = "AgentAway";
pub const UNINSTALLING: &str = "Uninstalling";
pub const UNINSTALL_WAITS: &str = "UninstallWaits";
/// ConfigMap, Secret or key are not there.
pub const VALUES_MISSING: &str = "ValuesMissing";
pub const VALUES_INVALID: &str = "ValuesInvalid";
pub const NAMESPACES_INVALID: &str = "NamespaceConfigurationInvalid";
/// They could not be read yet.
pub const VALUES_UNREAD: &str = "ValuesUnread";

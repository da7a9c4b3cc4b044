//! Labels that Krypton sets on release Secrets, and the key of a release.

/// Label on a release Secret: the full fingerprint of the installed chart and values.
pub const FINGERPRINT_LABEL: &str = "mesh.openkcm.io/fingerprint";
/// Label on a release Secret: the UID of the Tenant or KryptonDeployment that owns the release.
pub const OWNER_UID_LABEL: &str = "mesh.openkcm.io/tenant-uid";
/// Label on a release Secret: the namespace of its owner. For a KryptonDeployment, this namespace is on the
/// home cluster.
pub const OWNER_NAMESPACE_LABEL: &str = "mesh.openkcm.io/tenant-namespace";
/// Label on a release Secret: the Helm run that wrote it, as `<prefix><random>-<generation of the owner>`. If a
/// revision has the same value as its predecessor, another program wrote it.
pub const RUN_LABEL: &str = "mesh.openkcm.io/run";
/// Label on a release Secret: the number of the revision with which Krypton rolls this one back. Helm copies
/// the labels of the target revision to a rollback, so the rollback cannot get a new run label.
pub const ROLLBACK_LABEL: &str = "mesh.openkcm.io/rolled-back-by";
/// Prefix of [`RUN_LABEL`] for a run that started without a deployed revision.
pub const INSTALL_RUN: &str = "install-";
/// Prefix of [`RUN_LABEL`] for a run that started with a deployed revision.
pub const UPGRADE_RUN: &str = "upgrade-";

/// Identity of a release on a member.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReleaseKey {
    pub namespace: String,
    pub name: String,
}

impl ReleaseKey {
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

//! The labels that Krypton sets on release Secrets, and the name of a release.

/// Label on a release Secret: the full fingerprint of what was installed.
pub const FINGERPRINT_LABEL: &str = "mesh.openkcm.io/fingerprint";
/// Label on a release Secret: the UID of the Tenant or KryptonDeployment that owns the release.
pub const OWNER_UID_LABEL: &str = "mesh.openkcm.io/tenant-uid";
/// Label on a release Secret: the namespace of its owner, of a KryptonDeployment at home.
pub const OWNER_NAMESPACE_LABEL: &str = "mesh.openkcm.io/tenant-namespace";
/// Label on a release Secret: the one helm run that wrote it. A revision that inherits it from the
/// one before was written by somebody else.
pub const RUN_LABEL: &str = "mesh.openkcm.io/run";
/// Label on a release Secret: the number of the revision by which we are to roll back from it. Helm gives
/// a rollback the labels of the revision that it goes back to, so the run itself cannot sign.
pub const ROLLBACK_LABEL: &str = "mesh.openkcm.io/rolled-back-by";
/// What the value of [`RUN_LABEL`] begins with, when the run began where nothing was deployed.
pub const INSTALL_RUN: &str = "install-";
/// And when something was.
pub const UPGRADE_RUN: &str = "upgrade-";

/// Names a release on a member.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReleaseKey {
    pub namespace: String,
    pub name: String,
}

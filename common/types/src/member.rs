//! What a reconciler says of the member as a whole.

use crate::desired::Version;

/// What holds for the member as a whole.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemberReport {
    /// The watches have listed everything once, and every Tenant has its report.
    pub synced: bool,
    /// Whoever says this could reconcile at once if it had the Lease: it has a desired state, and has
    /// listed what there is.
    pub ready: bool,
    /// The Lease is ours, and was renewed within the last 30 s.
    pub writing: bool,
    /// Who holds the Lease, as far as is known; ourselves when writing.
    pub holder: Option<String>,
    /// The apiserver has answered within the last 30 s.
    pub connected: bool,
    /// Why not, when it has not; or why the newest desired state is not recorded.
    pub problem: Option<String>,
    /// The desired state that is recorded on the member and acted on.
    pub applied: Option<(Version, String)>,
    /// The member has a record of a later desired state than the one we were given.
    pub ahead: Option<Version>,
    /// How many Tenants wait to be restored after the deletion of their CRD, and why the first does.
    pub not_restored: Option<String>,
}

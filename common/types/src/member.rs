//! Report of a reconciler on the member as a whole.

use crate::desired::Version;

/// State of the member as a whole.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemberReport {
    /// The watches have completed their first list, and every Tenant has its report.
    pub synced: bool,
    /// The reporter could reconcile immediately if it held the Lease: it has a desired state and has listed all
    /// objects.
    pub ready: bool,
    /// The reporter holds the Lease and has renewed it within the last 30 s.
    pub writing: bool,
    /// The last known holder of the Lease. When `writing`, this is the reporter itself.
    pub holder: Option<String>,
    /// The API server has responded within the last 30 s.
    pub connected: bool,
    /// Why the API server has not responded, or why the latest desired state is not recorded. `None` without a
    /// problem.
    pub problem: Option<String>,
    /// The desired state that is recorded on the member and in use, with its digest.
    pub applied: Option<(Version, String)>,
    /// Set if the member has recorded a later desired state than the one that the hub sent.
    pub ahead: Option<Version>,
    /// Number of Tenants that wait to be restored after the deletion of their CRD, and the cause for the first one.
    pub not_restored: Option<String>,
}

//! Settings of the releases of a member.

use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

/// How Krypton reacts to an upgrade that it gives up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Remediation {
    /// Keep the failed revision. Objects that the upgrade did not change keep running.
    #[default]
    Keep,
    /// Roll back to the last deployed revision.
    Rollback,
}

impl FromStr for Remediation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "keep" => Ok(Self::Keep),
            "rollback" => Ok(Self::Rollback),
            other => Err(format!("{other:?} is neither \"keep\" nor \"rollback\"")),
        }
    }
}

/// Allowed values of [`Policy::history_max`]. With fewer than 2, Helm would not keep a failed revision next to the
/// deployed one. Krypton could then not find the leftovers of the failed attempt.
pub const HISTORY: RangeInclusive<u8> = 2..=100;
const HISTORY_DEFAULT: u8 = 3;

/// Settings that apply to all releases of a member.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Time that a release may take to become ready after Helm has exited.
    pub helm_timeout: Duration,
    /// Time for which Krypton respects a lock that it did not create.
    pub foreign_lock_grace: Duration,
    /// Number of retries after a failed install or upgrade; unlimited if `None`.
    pub retries: Option<u32>,
    pub remediation: Remediation,
    /// Number of revisions that Helm keeps of a release: the running one and the latest attempts.
    pub history_max: u8,
    /// Namespaces that are never a workspace, in addition to `kube-*` and `krypton-system`.
    pub protected_namespaces: Vec<String>,
}

impl Policy {
    /// Protects the process's `own` namespaces, except `default`, which every Tenant may use as a workspace.
    pub fn new(helm_timeout: Duration, own: impl IntoIterator<Item = String>) -> Self {
        let own = own.into_iter();
        Self {
            helm_timeout,
            foreign_lock_grace: helm_timeout * 3 + Duration::from_secs(60),
            retries: None,
            remediation: Remediation::default(),
            history_max: HISTORY_DEFAULT,
            protected_namespaces: own.filter(|namespace| namespace != "default").collect(),
        }
    }

    /// Sets the number of revisions to keep of each release, limited to [`HISTORY`].
    #[must_use]
    pub fn with_history(mut self, revisions: u8) -> Self {
        self.history_max = revisions.clamp(*HISTORY.start(), *HISTORY.end());
        self
    }

    /// Sets the number of retries, and the remediation after the last one.
    #[must_use]
    pub fn with_remediation(mut self, retries: Option<u32>, remediation: Remediation) -> Self {
        (self.retries, self.remediation) = (retries, remediation);
        self
    }
}

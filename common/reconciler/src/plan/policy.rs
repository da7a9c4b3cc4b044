//! Settings of the releases of a member.

use std::time::Duration;

use krypton_types::desired::handling::{HISTORY, Handling, Remediation};

/// Settings that apply to all releases of a member.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Time that a release may take to become ready after Helm has exited.
    pub helm_timeout: Duration,
    /// Time for which Krypton respects a lock that it did not create.
    pub foreign_lock_grace: Duration,
    /// Overrides the fleet's number of retries.
    pub retries: Option<u32>,
    /// Overrides the fleet's remediation.
    pub remediation: Option<Remediation>,
    /// Overrides the number of revisions that the fleet keeps of a release.
    pub history_max: Option<u8>,
    /// Namespaces that are never a workspace, in addition to `kube-*` and `krypton-system`.
    pub protected_namespaces: Vec<String>,
}

impl Policy {
    /// Protects the process's `own` namespaces, except `default`, which every Tenant may use as a workspace. Overrides
    /// no setting of the fleet.
    pub fn new(helm_timeout: Duration, own: impl IntoIterator<Item = String>) -> Self {
        let own = own.into_iter();
        Self {
            helm_timeout,
            foreign_lock_grace: helm_timeout * 3 + Duration::from_secs(60),
            retries: None,
            remediation: None,
            history_max: None,
            protected_namespaces: own.filter(|namespace| namespace != "default").collect(),
        }
    }

    /// Returns the fleet's handling with this member's overrides. Limits `history_max` to [`HISTORY`].
    pub fn handling(&self, fleet: &Handling) -> Handling {
        let history_max = self.history_max.unwrap_or(fleet.history_max);
        Handling {
            retries: self.retries.or(fleet.retries),
            remediation: self.remediation.unwrap_or(fleet.remediation),
            history_max: history_max.clamp(*HISTORY.start(), *HISTORY.end()),
            ..*fleet
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn member_overrides_single_settings_of_the_fleet() {
        let fleet = Handling {
            allow_chart_skip: true,
            retries: Some(5),
            remediation: Remediation::Rollback,
            history_max: 10,
            ..Handling::default()
        };
        let policy = Policy::new(Duration::from_secs(180), []);
        assert_eq!(policy.handling(&fleet), fleet);
        let (keep, rollback) = (Remediation::Keep, Remediation::Rollback);
        for (overrides, (retries, remediation, history_max)) in [
            ((Some(0), None, None), (0, rollback, 10)),
            ((None, Some(keep), None), (5, keep, 10)),
            ((None, None, Some(4)), (5, rollback, 4)),
        ] {
            let policy = Policy {
                retries: overrides.0,
                remediation: overrides.1,
                history_max: overrides.2,
                ..policy.clone()
            };
            let expected = Handling {
                retries: Some(retries),
                remediation,
                history_max,
                ..fleet
            };
            assert_eq!(policy.handling(&fleet), expected, "{overrides:?}");
        }
    }

    #[test]
    fn received_history_stays_within_its_limits() {
        let policy = Policy::new(Duration::from_secs(180), []);
        for (received, kept) in [(0, 2), (1, 2), (2, 2), (100, 100), (255, 100)] {
            let fleet = Handling {
                history_max: received,
                ..Handling::default()
            };
            assert_eq!(policy.handling(&fleet).history_max, kept);
        }
    }
}

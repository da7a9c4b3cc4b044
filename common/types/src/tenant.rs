//! What a member says of one Tenant.

use std::fmt;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use krypton_crds::tenant::{NextStep, TenantStatus};
use serde::{Deserialize, Serialize};

use crate::conditions::{ClusterState, MESSAGE_MAX, State};

/// A Tenant's namespace and name, the same on every member.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TenantKey {
    pub namespace: String,
    pub name: String,
}

impl fmt::Display for TenantKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The newest report of one member on one Tenant; an older one is worth nothing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TenantReport {
    /// `metadata.generation` of the member's Tenant that the report is about.
    pub observed_generation: i64,
    /// `status.lastAppliedChart`; empty until something was applied.
    pub applied_chart: String,
    pub state: ClusterState,
    /// What the member does next by itself, where something has failed or is waited for. In no digest: who does not
    /// know of it holds the same otherwise.
    #[serde(skip)]
    pub next: Option<Next>,
}

/// What a member does about a Tenant without anybody's doing, unless something changes before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    pub step: Step,
    /// By the member's wall clock, in whole seconds.
    pub at: Option<Timestamp>,
    /// Those that have failed, in a row.
    pub attempts: u32,
}

/// The kinds of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// What has failed is tried again.
    Retry,
    /// The release is taken over from whoever holds it.
    Unlock,
    /// Nothing, until chart, values or Tenant change or a person asks for it.
    GivenUp,
    /// It is not waited any longer for workloads to be ready.
    Wait,
}

/// Two times that differ by less say the same: each is counted anew from a clock that runs beside.
const SAME_TIME_SECONDS: i64 = 2;

impl Next {
    /// With its time in whole seconds, rounded.
    #[must_use]
    pub fn new(step: Step, at: Option<Timestamp>, attempts: u32) -> Self {
        let rounded = |at: Timestamp| {
            let second = at.as_millisecond().saturating_add(500).div_euclid(1000);
            Timestamp::from_second(second).unwrap_or(at)
        };
        Self {
            step,
            at: at.map(rounded),
            attempts,
        }
    }

    /// The same, out of seconds since 1970; `None` where that is no time that there is.
    pub fn at_second(step: Step, second: Option<i64>, attempts: u32) -> Option<Self> {
        let at = second.map(Timestamp::from_second).transpose().ok()?;
        Some(Self::new(step, at, attempts))
    }

    /// What the status says of `cluster`; `None` for a step that this version does not know.
    pub fn from_status(status: &TenantStatus, cluster: &str) -> Option<Self> {
        let said = status.next.iter().find(|next| next.cluster == cluster)?;
        let at = said.at.as_ref().map(|at| at.0);
        Some(Self::new(Step::of(&said.what)?, at, said.attempts))
    }

    /// What `cluster` does next, as a status has it.
    pub fn in_status(self, cluster: &str) -> NextStep {
        NextStep {
            cluster: cluster.to_owned(),
            what: self.step.as_str().to_owned(),
            at: self.at.map(Time),
            attempts: self.attempts,
        }
    }

    /// When, in seconds since 1970.
    pub fn second(self) -> Option<i64> {
        self.at.map(Timestamp::as_second)
    }

    /// What was said `before`, where this differs from it by a moment alone.
    #[must_use]
    pub fn settled(self, before: Option<Self>) -> Self {
        let same = |before: &Self| {
            let apart = match (before.at, self.at) {
                (Some(before), Some(now)) => (before.as_second() - now.as_second()).abs(),
                (None, None) => 0,
                _ => return false,
            };
            (before.step, before.attempts) == (self.step, self.attempts)
                && apart < SAME_TIME_SECONDS
        };
        before.filter(same).unwrap_or(self)
    }
}

impl Step {
    /// Every one.
    pub const ALL: [Self; 4] = [Self::Retry, Self::Unlock, Self::GivenUp, Self::Wait];

    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Retry => "Retry",
            Self::Unlock => "Unlock",
            Self::GivenUp => "GivenUp",
            Self::Wait => "Wait",
        }
    }

    /// The reverse; none of a word that is not known.
    pub fn of(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|step| step.as_str() == word)
    }
}

impl TenantReport {
    /// With every text cut to [`MESSAGE_MAX`] bytes: as it is sent, compared and kept.
    #[must_use]
    pub fn trimmed(mut self) -> Self {
        trim_all(&mut self.applied_chart, &mut self.state);
        self
    }
}

pub(crate) fn trim_all(applied_chart: &mut String, state: &mut ClusterState) {
    trim(applied_chart);
    let states = [
        Some(&mut state.ready),
        state.progress.as_mut(),
        state.error.as_mut(),
    ];
    for State {
        reason, message, ..
    } in states.into_iter().flatten()
    {
        trim(reason);
        trim(message);
    }
}

fn trim(text: &mut String) {
    text.truncate(text.floor_char_boundary(MESSAGE_MAX));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: i64) -> Option<Timestamp> {
        Some(Timestamp::from_millisecond(millis).unwrap())
    }

    #[test]
    fn next_time_is_rounded_and_small_changes_ignored() {
        let next = |millis| Next::new(Step::Retry, at(millis), 1);
        assert_eq!(next(1_499).at, at(1_000));
        assert_eq!(next(1_500).at, at(2_000));
        let said = next(10_000);
        assert_eq!(next(11_400).settled(Some(said)), said);
        assert_eq!(next(8_600).settled(Some(said)), said);
        assert_eq!(next(12_000).settled(Some(said)), next(12_000));
        assert_eq!(next(10_000).settled(None), said);
        let second = Next {
            attempts: 2,
            ..next(10_000)
        };
        assert_eq!(second.settled(Some(said)), second);
        let given_up = Next::new(Step::GivenUp, None, 1);
        assert_eq!(given_up.settled(Some(said)), given_up);
        assert_eq!(given_up.settled(Some(given_up)), given_up);
    }

    #[test]
    fn each_step_is_read_as_it_is_written() {
        for step in Step::ALL {
            assert_eq!(Step::of(step.as_str()), Some(step));
        }
        assert_eq!(Step::of("Later"), None);
    }
}

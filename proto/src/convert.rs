//! Converts between protobuf messages and domain types. Validates everything that the peer sends.

use std::collections::BTreeMap;
use std::sync::Arc;

use krypton_types::conditions::{ClusterState, State, Truth};
use krypton_types::deployment::{
    DeploymentKey, DeploymentReport, ReportedChart, ReportedEvent, ReportedRevision,
    ReportedRevisions,
};
use krypton_types::desired::{DesiredState, Version};
use krypton_types::labels::Labels;
use krypton_types::member::MemberReport;
use krypton_types::names::{
    AGENT_MANAGER, LABEL_MAX, SUBDOMAIN_MAX, is_dns_label, is_dns_subdomain,
};
use krypton_types::placed_tenant::PlacedReport;
use krypton_types::root_digest::{ROOTS_MAX, RootDigest};
use krypton_types::tenant::{TenantKey, TenantReport, UpcomingStep, UpcomingStepKind};
use krypton_types::text::truncated;
use thiserror::Error;

use crate::v1;

/// Length limit in bytes for texts from the peer that have no other limit.
const TEXT_MAX: usize = 1024;

/// A message that breaks the protocol.
#[derive(Debug, Error)]
pub enum WireError {
    #[error("{0} is missing")]
    Missing(&'static str),
    /// The error of the parser may contain a secret value, so only its position is kept.
    #[error("the desired state cannot be read at line {line}, column {column}")]
    State { line: usize, column: usize },
    #[error("namespace or name of {0} is empty or too long")]
    Key(&'static str),
    #[error("the UID of {0} is empty or too long")]
    Uid(&'static str),
    #[error("the desired state does not have the digest that came with it")]
    Digest,
    #[error("{0} is not one")]
    Name(&'static str),
    #[error("{0} was not expected")]
    Unexpected(&'static str),
}

impl From<Version> for v1::Version {
    fn from(version: Version) -> Self {
        let Version { epoch, generation } = version;
        Self { epoch, generation }
    }
}

impl From<v1::Version> for Version {
    fn from(version: v1::Version) -> Self {
        let v1::Version { epoch, generation } = version;
        Self { epoch, generation }
    }
}

impl v1::TrustedRoots {
    pub fn new(roots: &[RootDigest]) -> Self {
        let sha256 = roots.iter().map(|root| root.bytes().to_vec().into());
        Self {
            sha256: sha256.collect(),
        }
    }

    pub fn read(&self) -> Result<Vec<RootDigest>, WireError> {
        if self.sha256.len() > ROOTS_MAX {
            return Err(WireError::Unexpected("a list with too many roots"));
        }
        let digest_of = |bytes: &prost::bytes::Bytes| RootDigest::from_bytes(bytes);
        let mut roots = self
            .sha256
            .iter()
            .map(digest_of)
            .collect::<Option<Vec<_>>>()
            .ok_or(WireError::Name("the digest of a root"))?;
        roots.sort_unstable();
        roots.dedup();
        Ok(roots)
    }
}

impl From<&DesiredState> for v1::Desired {
    fn from(desired: &DesiredState) -> Self {
        Self {
            // Serialization into memory does not fail.
            state: serde_json::to_vec(desired).unwrap_or_default().into(),
            digest: desired.digest(),
        }
    }
}

impl TryFrom<v1::Desired> for DesiredState {
    type Error = WireError;

    fn try_from(desired: v1::Desired) -> Result<Self, WireError> {
        let state = desired.read_unchecked()?;
        // An unknown field would change the digest. The member must not act on a partly understood state.
        if state.digest() == desired.digest {
            Ok(state)
        } else {
            Err(WireError::Digest)
        }
    }
}

impl v1::Desired {
    /// Reads the desired state without a digest check.
    pub(crate) fn read_unchecked(&self) -> Result<DesiredState, WireError> {
        let state: DesiredState =
            serde_json::from_slice(&self.state).map_err(|error| WireError::State {
                line: error.line(),
                column: error.column(),
            })?;
        // The hub must not send the keys that mark a namespace as Krypton's.
        let result = state.namespaces.check();
        result.map_err(|_| WireError::Name("the configuration of namespaces"))?;
        for order in &state.deployments {
            check_key("a deployment", &order.namespace, &order.name)?;
            check_uid("a deployment", &order.uid)?;
        }
        for order in &state.placed {
            if !is_dns_label(&order.namespace) || !is_dns_subdomain(&order.name) {
                return Err(WireError::Name("the key of a placed Tenant"));
            }
            check_uid("a placed Tenant", &order.uid)?;
        }
        Ok(state)
    }
}

/// The lengths that Kubernetes allows for the namespace and the name of an object.
fn check_key(subject: &'static str, namespace: &str, name: &str) -> Result<(), WireError> {
    let fits = |text: &str, max| (1..=max).contains(&text.len());
    (fits(namespace, LABEL_MAX) && fits(name, SUBDOMAIN_MAX))
        .then_some(())
        .ok_or(WireError::Key(subject))
}

/// The UID becomes a label value.
fn check_uid(subject: &'static str, uid: &str) -> Result<(), WireError> {
    (1..=LABEL_MAX)
        .contains(&uid.len())
        .then_some(())
        .ok_or(WireError::Uid(subject))
}

impl v1::Applied {
    pub fn new(version: Version, digest: String) -> Self {
        let version = Some(version.into());
        Self { version, digest }
    }

    /// Returns version and digest. `None` without a version, or with numbers that no status can have.
    pub fn read(self) -> Option<(Version, String)> {
        let version: Version = self.version?.into();
        let fits = |number: u64| i64::try_from(number).is_ok();
        let is_valid = fits(version.epoch) && fits(version.generation);
        is_valid.then(|| (version, truncated(self.digest, TEXT_MAX)))
    }
}

impl v1::Heartbeat {
    /// Takes the value of a digest of all reported objects: their count and their sum.
    pub fn new((tenants, sum): (u64, u128)) -> Self {
        Self {
            tenants,
            digest_high: (sum >> 64) as u64,
            digest_low: sum as u64,
        }
    }

    /// Returns the value of the digest.
    pub fn digest(&self) -> (u64, u128) {
        let sum = (u128::from(self.digest_high) << 64) | u128::from(self.digest_low);
        (self.tenants, sum)
    }
}

impl From<MemberReport> for v1::MemberReport {
    fn from(report: MemberReport) -> Self {
        let MemberReport {
            synced,
            ready,
            writing,
            holder,
            connected,
            problem,
            applied,
            ahead,
            not_restored,
        } = report;
        Self {
            synced,
            ready,
            writing,
            holder,
            connected,
            problem: problem.map(|problem| truncated(problem, TEXT_MAX)),
            applied: applied.map(|(version, digest)| v1::Applied::new(version, digest)),
            ahead: ahead.map(Into::into),
            not_restored: not_restored.map(|reason| truncated(reason, TEXT_MAX)),
        }
    }
}

impl From<v1::MemberReport> for MemberReport {
    fn from(member: v1::MemberReport) -> Self {
        let v1::MemberReport {
            synced,
            ready,
            writing,
            holder,
            connected,
            problem,
            applied,
            ahead,
            not_restored,
        } = member;
        Self {
            synced,
            ready,
            writing,
            holder: holder.map(|holder| truncated(holder, SUBDOMAIN_MAX)),
            connected,
            problem: problem.map(|problem| truncated(problem, TEXT_MAX)),
            applied: applied.and_then(v1::Applied::read),
            ahead: ahead.map(Into::into),
            not_restored: not_restored.map(|reason| truncated(reason, TEXT_MAX)),
        }
    }
}

impl v1::Tenant {
    pub fn new(key: &TenantKey, report: Option<&TenantReport>) -> Self {
        Self {
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            state: report.map(|report| v1::TenantState {
                next: report.next.map(v1::Next::new),
                labels: report.labels.to_map(),
                ..v1::TenantState::new(
                    report.observed_generation,
                    &report.applied_chart,
                    &report.state,
                    report.handled_request.clone(),
                )
            }),
        }
    }

    /// Returns the key of the Tenant and its report, if any.
    pub fn read(self) -> Result<(TenantKey, Option<TenantReport>), WireError> {
        check_key("a Tenant", &self.namespace, &self.name)?;
        let key = TenantKey::new(self.namespace, self.name);
        let Some(state) = self.state else {
            return Ok((key, None));
        };
        let report = TenantReport {
            observed_generation: state.observed_generation,
            applied_chart: state.applied_chart.clone(),
            next: state.next.as_ref().and_then(v1::Next::read),
            handled_request: state.handled_request.clone(),
            labels: Labels::new(&state.labels),
            state: state.read("a Tenant's state")?,
            history: None,
        };
        Ok((key, Some(report.trimmed())))
    }
}

impl v1::TenantState {
    fn new(
        observed_generation: i64,
        applied_chart: &str,
        state: &ClusterState,
        handled_request: Option<String>,
    ) -> Self {
        Self {
            observed_generation,
            applied_chart: applied_chart.to_owned(),
            ready: Some((&state.ready).into()),
            progress: state.progress.as_ref().map(Into::into),
            error: state.error.as_ref().map(Into::into),
            next: None,
            handled_request,
            labels: BTreeMap::new(),
        }
    }

    fn read(self, subject: &'static str) -> Result<ClusterState, WireError> {
        Ok(ClusterState {
            ready: self.ready.ok_or(WireError::Missing(subject))?.into(),
            progress: self.progress.map(Into::into),
            error: self.error.map(Into::into),
        })
    }
}

impl v1::Next {
    fn new(next: UpcomingStep) -> Self {
        Self {
            step: next.step.as_str().to_owned(),
            at: next.second(),
            attempts: next.attempts,
        }
    }

    /// Returns `None` if the step is unknown or the time is out of range.
    fn read(&self) -> Option<UpcomingStep> {
        UpcomingStep::at_second(UpcomingStepKind::parse(&self.step)?, self.at, self.attempts)
    }
}

impl v1::Deployment {
    pub fn new(key: &DeploymentKey, report: Option<&DeploymentReport>) -> Self {
        Self {
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            state: report.map(|report| v1::DeploymentState {
                uid: report.uid.clone(),
                gone: report.gone,
                state: Some(v1::TenantState {
                    next: report.next.map(v1::Next::new),
                    ..v1::TenantState::new(
                        report.observed_generation,
                        &report.applied_chart,
                        &report.state,
                        report.handled_request.clone(),
                    )
                }),
                events: report.events.iter().map(v1::ReportedEvent::new).collect(),
                revisions: report.revisions.as_deref().map(v1::Revisions::new),
            }),
        }
    }

    /// Returns the key of the deployment and its report, if any.
    pub fn read(self) -> Result<(DeploymentKey, Option<DeploymentReport>), WireError> {
        check_key("a deployment", &self.namespace, &self.name)?;
        let key = DeploymentKey::new(self.namespace, self.name);
        let Some(wire_state) = self.state else {
            return Ok((key, None));
        };
        check_uid("a deployment", &wire_state.uid)?;
        let subject = "a deployment's state";
        let state = wire_state.state.ok_or(WireError::Missing(subject))?;
        let report = DeploymentReport {
            uid: wire_state.uid,
            observed_generation: state.observed_generation,
            gone: wire_state.gone,
            applied_chart: state.applied_chart.clone(),
            next: state.next.as_ref().and_then(v1::Next::read),
            handled_request: state.handled_request.clone(),
            state: state.read(subject)?,
            events: wire_state
                .events
                .into_iter()
                .map(v1::ReportedEvent::read)
                .collect(),
            revisions: wire_state.revisions.map(|it| Arc::new(it.read())),
        };
        Ok((key, Some(report.trimmed())))
    }
}

impl v1::ReportedEvent {
    fn new(event: &ReportedEvent) -> Self {
        Self {
            at: event.at,
            reason: event.reason.clone(),
            message: event.message.clone(),
        }
    }

    fn read(self) -> ReportedEvent {
        ReportedEvent {
            at: self.at,
            reason: self.reason,
            message: self.message,
        }
    }
}

impl v1::Revisions {
    fn new(revisions: &ReportedRevisions) -> Self {
        let newest = revisions.newest_first().iter().map(v1::Revision::new);
        Self {
            newest: newest.collect(),
        }
    }

    fn read(self) -> ReportedRevisions {
        let revisions = self.newest.into_iter().map(v1::Revision::read);
        // Only agents send messages to the hub.
        ReportedRevisions::new(AGENT_MANAGER, revisions.collect())
    }
}

impl v1::Revision {
    fn new(revision: &ReportedRevision) -> Self {
        Self {
            number: revision.revision,
            created: revision.created,
            status: revision.status.clone(),
            fingerprint: revision.fingerprint.clone(),
            owner_uid: revision.owner_uid.clone(),
            run: revision.run.clone(),
            rolled_back_by: revision.rolled_back_by,
            chart: revision.chart.as_ref().map(|chart| v1::RevisionChart {
                name: chart.name.clone(),
                version: chart.version.clone(),
                is_read: chart.is_read,
            }),
        }
    }

    fn read(self) -> ReportedRevision {
        ReportedRevision {
            revision: self.number,
            created: self.created,
            status: self.status,
            fingerprint: self.fingerprint,
            owner_uid: self.owner_uid,
            run: self.run,
            rolled_back_by: self.rolled_back_by,
            chart: self.chart.map(|chart| ReportedChart {
                name: chart.name,
                version: chart.version,
                is_read: chart.is_read,
            }),
        }
    }
}

impl v1::Placed {
    pub fn new(key: &TenantKey, report: Option<&PlacedReport>) -> Self {
        Self {
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            state: report.map(|report| v1::PlacedState {
                uid: report.uid.clone(),
                observed_generation: report.observed_generation,
                gone: report.gone,
                placed: Some((&report.state).into()),
            }),
        }
    }

    /// Returns the key of the placed Tenant and its report, if any.
    pub fn read(self) -> Result<(TenantKey, Option<PlacedReport>), WireError> {
        check_key("a placed Tenant", &self.namespace, &self.name)?;
        let key = TenantKey::new(self.namespace, self.name);
        let Some(wire_state) = self.state else {
            return Ok((key, None));
        };
        check_uid("a placed Tenant", &wire_state.uid)?;
        let report = PlacedReport {
            uid: wire_state.uid,
            observed_generation: wire_state.observed_generation,
            gone: wire_state.gone,
            state: wire_state
                .placed
                .ok_or(WireError::Missing("whether a Tenant is placed"))?
                .into(),
        };
        Ok((key, Some(report.trimmed())))
    }
}

impl From<&State> for v1::Condition {
    fn from(state: &State) -> Self {
        let truth = match state.truth {
            Truth::True => v1::Truth::True,
            Truth::False => v1::Truth::False,
            Truth::Unknown => v1::Truth::Unknown,
        };
        Self {
            truth: truth.into(),
            reason: state.reason.clone(),
            message: state.message.clone(),
        }
    }
}

impl From<v1::Condition> for State {
    fn from(condition: v1::Condition) -> Self {
        let truth = match condition.truth() {
            v1::Truth::True => Truth::True,
            v1::Truth::False => Truth::False,
            // Values of a later protocol revision count as unknown.
            v1::Truth::Unknown | v1::Truth::Unspecified => Truth::Unknown,
        };
        Self::new(truth, condition.reason, condition.message)
    }
}

#[cfg(test)]
mod tests;

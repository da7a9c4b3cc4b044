//! Converts between protobuf messages and domain types. Validates everything that the peer sends.

use krypton_types::conditions::{ClusterState, State, Truth};
use krypton_types::deployment::{DeploymentKey, DeploymentReport, ReportedEvent};
use krypton_types::desired::{DesiredState, Version};
use krypton_types::member::MemberReport;
use krypton_types::names::{LABEL_MAX, SUBDOMAIN_MAX, is_dns_label, is_dns_subdomain};
use krypton_types::placed_tenant::PlacedReport;
use krypton_types::root_digest::{ROOTS_MAX, RootDigest};
use krypton_types::tenant::{TenantKey, TenantReport, UpcomingStep, UpcomingStepKind};
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
            return Err(WireError::Unexpected("so many roots"));
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

/// Converts the version and digest of the applied desired state.
pub(crate) fn applied(applied: &(Version, String)) -> v1::Applied {
    v1::Applied {
        version: Some(applied.0.into()),
        digest: applied.1.clone(),
    }
}

impl v1::Applied {
    pub fn new(version: Version, digest: String) -> Self {
        applied(&(version, digest))
    }

    /// Returns version and digest, or `None` without a version.
    pub fn read(self) -> Option<(Version, String)> {
        Some((self.version?.into(), truncate(self.digest, TEXT_MAX)))
    }
}

impl From<&MemberReport> for v1::MemberReport {
    fn from(report: &MemberReport) -> Self {
        let MemberReport {
            synced,
            ready,
            writing,
            holder,
            connected,
            problem,
            applied: applied_state,
            ahead,
            not_restored,
        } = report;
        Self {
            synced: *synced,
            ready: *ready,
            writing: *writing,
            holder: holder.clone(),
            connected: *connected,
            problem: problem.clone().map(|problem| truncate(problem, TEXT_MAX)),
            applied: applied_state.as_ref().map(applied),
            ahead: ahead.map(Into::into),
            not_restored: not_restored
                .clone()
                .map(|reason| truncate(reason, TEXT_MAX)),
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
            holder: holder.map(|holder| truncate(holder, SUBDOMAIN_MAX)),
            connected,
            problem: problem.map(|problem| truncate(problem, TEXT_MAX)),
            applied: applied.and_then(v1::Applied::read),
            ahead: ahead.map(Into::into),
            not_restored: not_restored.map(|reason| truncate(reason, TEXT_MAX)),
        }
    }
}

impl v1::Tenant {
    pub fn new(key: &TenantKey, report: Option<&TenantReport>) -> Self {
        Self {
            namespace: key.namespace.clone(),
            name: key.name.clone(),
            state: report.map(|report| {
                let state = v1::TenantState::new(
                    report.observed_generation,
                    &report.applied_chart,
                    &report.state,
                );
                v1::TenantState {
                    next: report.next.map(v1::Next::new),
                    ..state
                }
            }),
        }
    }

    /// Returns the key of the Tenant and its report, if any.
    pub fn read(self) -> Result<(TenantKey, Option<TenantReport>), WireError> {
        check_key("a Tenant", &self.namespace, &self.name)?;
        let key = TenantKey {
            namespace: self.namespace,
            name: self.name,
        };
        let Some(state) = self.state else {
            return Ok((key, None));
        };
        let report = TenantReport {
            observed_generation: state.observed_generation,
            applied_chart: state.applied_chart.clone(),
            next: state.next.as_ref().and_then(v1::Next::read),
            state: state.read("a Tenant's state")?,
        };
        Ok((key, Some(report.trimmed())))
    }
}

impl v1::TenantState {
    fn new(observed_generation: i64, applied_chart: &str, state: &ClusterState) -> Self {
        Self {
            observed_generation,
            applied_chart: applied_chart.to_owned(),
            ready: Some((&state.ready).into()),
            progress: state.progress.as_ref().map(Into::into),
            error: state.error.as_ref().map(Into::into),
            next: None,
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
                state: Some(v1::TenantState::new(
                    report.observed_generation,
                    &report.applied_chart,
                    &report.state,
                )),
                events: report.events.iter().map(v1::ReportedEvent::new).collect(),
            }),
        }
    }

    /// Returns the key of the deployment and its report, if any.
    pub fn read(self) -> Result<(DeploymentKey, Option<DeploymentReport>), WireError> {
        check_key("a deployment", &self.namespace, &self.name)?;
        let key = DeploymentKey {
            namespace: self.namespace,
            name: self.name,
        };
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
            state: state.read(subject)?,
            events: wire_state
                .events
                .into_iter()
                .map(v1::ReportedEvent::read)
                .collect(),
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
        let key = TenantKey {
            namespace: self.namespace,
            name: self.name,
        };
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

/// Truncates a text to at most `max` bytes, at a character boundary.
fn truncate(mut text: String, max: usize) -> String {
    text.truncate(text.floor_char_boundary(max));
    text
}

#[cfg(test)]
mod tests {
    use krypton_types::deployment::DesiredDeployment;
    use krypton_types::desired::crd_policy::CrdPolicy;
    use krypton_types::desired::drift::{DriftMode, DriftPolicy};
    use krypton_types::desired::handling::{Handling, Remediation, WaitPolicy};
    use krypton_types::desired::lockdown::Lockdown;
    use krypton_types::desired::namespaces::NamespaceConfiguration;
    use krypton_types::desired::{ChartState, Confidential};
    use krypton_types::placed_tenant::{PlacedSpec, PlacedTenant};
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn desired() -> DesiredState {
        DesiredState {
            version: Version {
                epoch: 3,
                generation: 7,
            },
            chart: ChartState {
                repo: "https://charts.example.org".to_owned(),
                name: "small".to_owned(),
                version: "1.0.0".to_owned(),
                install_crds: true,
                values: [("a".to_owned(), serde_json::json!({"b": [1, null]}))]
                    .into_iter()
                    .collect(),
                confidential: Some(Confidential {
                    salt: "salt".to_owned(),
                    paths: vec!["/a/b".to_owned()],
                }),
                pinned: Some("1.0.0@sha256:ab".to_owned()),
            },
            paused: true,
            retire: false,
            drift: DriftPolicy {
                mode: DriftMode::Heal,
                interval_seconds: 60,
            },
            chart_crds: CrdPolicy::CreateReplace,
            tenant_values: true,
            handling: Handling {
                wait: WaitPolicy::Hooks,
                delete_cert_manager_crds: true,
                allow_chart_skip: true,
                retries: Some(3),
                remediation: Remediation::Rollback,
                history_max: 10,
            },
            lockdown: Lockdown {
                no_cross_namespace_refs: true,
                default_service_account: "helm".to_owned(),
            },
            namespaces: NamespaceConfiguration {
                labels: [("team".to_owned(), "a".to_owned())].into(),
                annotations: [("example.org/note".to_owned(), "a, b".to_owned())].into(),
            },
            deployments: vec![DesiredDeployment {
                namespace: "accounts".to_owned(),
                name: "acme".to_owned(),
                uid: "uid-1".to_owned(),
                generation: 4,
                created: 1_800_000_000,
                remove: true,
                orphan: true,
                paused: true,
                requested: Some("now".to_owned()),
                drift: Some(DriftPolicy {
                    mode: DriftMode::Warn,
                    interval_seconds: 5,
                }),
                annotations: [("a".to_owned(), "b".to_owned())].into(),
            }],
            placed: vec![PlacedTenant {
                namespace: "tenants".to_owned(),
                name: "acme".to_owned(),
                uid: "uid-2".to_owned(),
                generation: 5,
                spec: PlacedSpec {
                    workspace: Some("acme-ws".to_owned()),
                    values: serde_json::from_str(r#"{"a":[1,null]}"#).unwrap(),
                    service_account_name: Some("helm".to_owned()),
                },
                remove: true,
                adopt: true,
                paused: true,
                requested: Some("now".to_owned()),
                former_uid: Some("uid-0".to_owned()),
            }],
        }
    }

    /// Reads `original` after a change to its JSON, which leaves the digest as it was.
    fn with_changed_state(
        original: &DesiredState,
        change: impl FnOnce(&mut Value),
    ) -> Result<DesiredState, WireError> {
        let mut wire = v1::Desired::from(original);
        let mut state = serde_json::from_slice(&wire.state).unwrap();
        change(&mut state);
        wire.state = state.to_string().into();
        wire.try_into()
    }

    #[test]
    fn a_desired_state_arrives_as_it_was_sent() {
        let retire = DesiredState {
            retire: true,
            ..desired()
        };
        for original in [desired(), retire, DesiredState::default()] {
            let wire = v1::Desired::from(&original);
            assert_eq!(DesiredState::try_from(wire).unwrap(), original);
        }
    }

    #[test]
    fn desired_state_without_some_field_is_rejected() {
        let original = DesiredState {
            retire: true,
            ..desired()
        };
        // The receiver does not know the field.
        for field in [
            "/retire",
            "/drift",
            "/tenantValues",
            "/allowChartSkip",
            "/retries",
            "/remediation",
            "/historyMax",
            "/lockdown",
            "/namespaceConfiguration",
            "/chart/confidential",
            "/deployments",
            "/deployments/0/remove",
            "/placed",
            "/placed/0/adopt",
            "/placed/0/spec/values",
        ] {
            let result = with_changed_state(&original, |state| {
                let (parent, name) = field.rsplit_once('/').unwrap();
                let parent = state.pointer_mut(parent).unwrap();
                let removed = parent.as_object_mut().unwrap().remove(name);
                assert!(removed.is_some(), "{field}");
            });
            assert!(
                matches!(result, Err(WireError::Digest)),
                "{field}: {result:?}"
            );
        }
        let unknown = with_changed_state(&original, |state| state["future"] = true.into());
        assert_eq!(unknown.unwrap(), original, "the digest does not cover it");
    }

    #[test]
    fn invalid_names_and_types_are_rejected() {
        type Matches = fn(&WireError) -> bool;
        let key: Matches = |error| matches!(error, WireError::Key(_));
        let name: Matches = |error| matches!(error, WireError::Name(_));
        let uid: Matches = |error| matches!(error, WireError::Uid(_));
        let state: Matches = |error| matches!(error, WireError::State { .. });
        let reserved = json!({"mesh.openkcm.io/created-for": "a"});
        for (field, value, expected) in [
            ("/deployments/0/uid", json!(""), uid),
            ("/deployments/0/name", json!("a".repeat(254)), key),
            ("/deployments/0/namespace", json!(""), key),
            ("/placed/0/uid", json!("a".repeat(64)), uid),
            ("/placed/0/namespace", json!("../a"), name),
            ("/placed/0/name", json!(""), name),
            ("/placed/0/spec/values", json!([]), state),
            ("/namespaceConfiguration/labels", reserved, name),
            ("/drift/mode", json!("mend"), state),
            ("/remediation", json!("undo"), state),
            ("/chart", json!(null), state),
            ("/chart/values", json!([]), state),
        ] {
            let read = with_changed_state(&desired(), |state| {
                *state.pointer_mut(field).unwrap() = value;
            });
            assert!(expected(&read.unwrap_err()), "{field}");
        }
    }

    #[test]
    fn parse_error_does_not_contain_secrets() {
        let error =
            with_changed_state(&desired(), |state| state["paused"] = "hunter2".into()).unwrap_err();
        assert!(!krypton_types::error_chain::chain(&error).contains("hunter2"));
    }

    #[test]
    fn root_digests_round_trip_and_malformed_are_rejected() {
        let all = RootDigest::from_ders(&[b"a", b"b"]);
        let message = v1::TrustedRoots::new(&all);
        assert_eq!(message.read().unwrap(), all);
        let mut cut = message.clone();
        cut.sha256[1].truncate(31);
        assert!(matches!(cut.read(), Err(WireError::Name(_))));
        let many = v1::TrustedRoots {
            sha256: vec![message.sha256[0].clone(); ROOTS_MAX + 1],
        };
        assert!(matches!(many.read(), Err(WireError::Unexpected(_))));
    }

    #[test]
    fn old_agent_ignores_unknown_hub_message() {
        use prost::Message as _;
        let roots = v1::Roots {
            certificates: vec![vec![1, 2].into()],
            renew_within_millis: Some(1),
        };
        // Simulate an unknown kind of message: the same content under another field number.
        let mut wire = v1::HubMessage {
            kind: Some(v1::hub_message::Kind::Roots(roots)),
        }
        .encode_to_vec();
        wire[0] = (14 << 3) | 2;
        let read = v1::HubMessage::decode(wire.as_slice()).unwrap();
        assert_eq!(read.kind, None);
    }

    #[test]
    fn trimmed_report_has_same_digest_on_both_sides() {
        let key = TenantKey {
            namespace: "n".to_owned(),
            name: "t".to_owned(),
        };
        let long = State::new(Truth::False, "InstallFailed", "ä".repeat(2000));
        let state = ClusterState {
            ready: long.clone(),
            progress: None,
            error: Some(long),
        };
        let report = TenantReport {
            observed_generation: 1,
            applied_chart: String::new(),
            state,
            next: None,
        }
        .trimmed();
        let (_, received) = v1::Tenant::new(&key, Some(&report)).read().unwrap();
        let part = |report| krypton_types::report_digest::part(&key, report);
        assert_eq!(part(&report), part(&received.unwrap()));
    }

    #[test]
    fn long_text_is_truncated_at_character_boundary() {
        assert_eq!(truncate("äää".to_owned(), 3), "ä");
    }

    fn state() -> impl Strategy<Value = State> {
        let truth = prop_oneof![Just(Truth::True), Just(Truth::False), Just(Truth::Unknown)];
        (truth, "[A-Z][a-z]{0,9}", ".{0,40}")
            .prop_map(|(truth, reason, message)| State::new(truth, reason, message))
    }

    proptest! {
        #[test]
        fn a_report_arrives_as_it_was_sent(
            generation: i64, applied_chart in ".{0,40}", ready in state(),
            progress in proptest::option::of(state()), error in proptest::option::of(state()),
            next in proptest::option::of((0..4_usize, proptest::option::of(0..4_000_000_000_i64), 0..9_u32)),
        ) {
            let next = next.and_then(|(step, at, attempts)| UpcomingStep::at_second(UpcomingStepKind::ALL[step], at, attempts));
            let key = TenantKey { namespace: "n".to_owned(), name: "t".to_owned() };
            let state = ClusterState { ready, progress, error };
            let report = TenantReport { observed_generation: generation, applied_chart, state, next };
            let (read_key, read) = v1::Tenant::new(&key, Some(&report)).read().unwrap();
            prop_assert_eq!(read_key, key);
            prop_assert_eq!(read, Some(report));
        }

        #[test]
        fn deployment_report_round_trips_unchanged(
            observed_generation: i64, gone: bool, applied_chart in ".{0,40}", ready in state(),
            error in proptest::option::of(state()),
        ) {
            let key = DeploymentKey { namespace: "n".to_owned(), name: "d".to_owned() };
            let report = DeploymentReport {
                uid: "uid-1".to_owned(), observed_generation, gone, applied_chart,
                state: ClusterState { ready, progress: None, error },
                events: vec![ReportedEvent { at: 1, reason: "DriftHealed".to_owned(), message: "put right".to_owned() }],
            };
            let (read_key, read) = v1::Deployment::new(&key, Some(&report)).read().unwrap();
            prop_assert_eq!(read_key, key);
            prop_assert_eq!(read, Some(report));
        }

        #[test]
        fn placed_tenant_report_round_trips_unchanged(
            observed_generation: i64, gone: bool, state in state(),
        ) {
            let key = TenantKey { namespace: "n".to_owned(), name: "t".to_owned() };
            let uid = "uid-1".to_owned();
            let report = PlacedReport { uid, observed_generation, gone, state };
            let (read_key, read) = v1::Placed::new(&key, Some(&report)).read().unwrap();
            prop_assert_eq!(read_key, key);
            prop_assert_eq!(read, Some(report));
        }

        #[test]
        fn a_member_report_arrives_as_it_was_sent(
            flags: [bool; 4], holder in proptest::option::of("[a-z]{1,20}"),
            version in proptest::option::of((any::<u64>(), any::<u64>())),
        ) {
            let version = version.map(|(epoch, generation)| Version { epoch, generation });
            let [synced, ready, writing, connected] = flags;
            let report = MemberReport {
                synced, ready, writing, connected,
                problem: holder.clone(), not_restored: holder.clone(), holder,
                applied: version.map(|version| (version, "digest".to_owned())),
                ahead: version,
            };
            prop_assert_eq!(MemberReport::from(v1::MemberReport::from(&report)), report);
        }
    }
}

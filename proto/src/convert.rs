//! Converts between protobuf messages and domain types. Validates everything that the peer sends.

use std::collections::BTreeMap;

use krypton_types::conditions::{ClusterState, State, Truth};
use krypton_types::deployment::{
    DeploymentKey, DeploymentReport, DesiredDeployment, ReportedEvent,
};
use krypton_types::desired::crd_policy::CrdPolicy;
use krypton_types::desired::drift::DriftPolicy;
use krypton_types::desired::handling::{Handling, WaitPolicy};
use krypton_types::desired::lockdown::Lockdown;
use krypton_types::desired::namespaces::NamespaceConfiguration;
use krypton_types::desired::{ChartState, Confidential, DesiredState, Version};
use krypton_types::member::MemberReport;
use krypton_types::names::{LABEL_MAX, SUBDOMAIN_MAX, is_dns_label, is_dns_subdomain};
use krypton_types::placed_tenant::{PlacedReport, PlacedSpec, PlacedTenant};
use krypton_types::root_digest::{ROOTS_MAX, RootDigest};
use krypton_types::tenant::{Next, Step, TenantKey, TenantReport};
use thiserror::Error;

use crate::v1;

/// Length limit in bytes for texts from the peer that have no other limit.
const TEXT_MAX: usize = 1024;

/// A message that breaks the protocol.
#[derive(Debug, Error)]
pub enum WireError {
    #[error("{0} is missing")]
    Missing(&'static str),
    #[error("the chart's values are not a JSON object")]
    Values(#[source] serde_json::Error),
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

impl v1::Trusts {
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
        let read = |bytes: &prost::bytes::Bytes| RootDigest::from_bytes(bytes);
        let mut roots = self
            .sha256
            .iter()
            .map(read)
            .collect::<Option<Vec<_>>>()
            .ok_or(WireError::Name("the digest of a root"))?;
        roots.sort_unstable();
        roots.dedup();
        Ok(roots)
    }
}

impl From<&DesiredState> for v1::Desired {
    fn from(desired: &DesiredState) -> Self {
        let DesiredState {
            version,
            chart,
            paused,
            retire,
            drift,
            chart_crds,
            tenant_values,
            handling,
            lockdown,
            namespaces,
            deployments,
            placed,
        } = desired;
        let Handling {
            wait,
            delete_cert_manager_crds,
            allow_chart_skip,
        } = handling;
        let ChartState {
            repo,
            name,
            version: chart_version,
            install_crds,
            values,
            confidential,
            pinned,
        } = chart;
        Self {
            version: Some((*version).into()),
            chart: Some(v1::Chart {
                repo: repo.clone(),
                name: name.clone(),
                version: chart_version.clone(),
                install_crds: *install_crds,
                values: serde_json::Value::Object(values.clone()).to_string().into(),
                confidential: confidential.as_ref().map(|confidential| v1::Confidential {
                    salt: confidential.salt.clone(),
                    paths: confidential.paths.clone(),
                }),
                pinned: pinned.clone(),
            }),
            paused: *paused,
            retire: *retire,
            digest: desired.digest(),
            drift: (!drift.is_default()).then(|| (*drift).into()),
            chart_crds: match chart_crds.is_default() {
                true => String::new(),
                false => chart_crds.to_string(),
            },
            tenant_values: *tenant_values,
            wait: match wait.is_default() {
                true => String::new(),
                false => wait.to_string(),
            },
            delete_cert_manager_crds: *delete_cert_manager_crds,
            allow_chart_skip: *allow_chart_skip,
            no_cross_namespace_refs: lockdown.no_cross_namespace_refs,
            default_service_account: lockdown.default_service_account.clone(),
            deployments: deployments.iter().map(Into::into).collect(),
            placed: placed.iter().map(Into::into).collect(),
            namespaces: (!namespaces.is_empty()).then(|| namespaces.into()),
        }
    }
}

impl From<&NamespaceConfiguration> for v1::NamespaceConfiguration {
    fn from(configuration: &NamespaceConfiguration) -> Self {
        let written = |map: &BTreeMap<String, String>| {
            let pairs = map.clone().into_iter();
            pairs
                .map(|(name, value)| v1::Annotation { name, value })
                .collect()
        };
        Self {
            labels: written(&configuration.labels),
            annotations: written(&configuration.annotations),
        }
    }
}

impl TryFrom<v1::NamespaceConfiguration> for NamespaceConfiguration {
    type Error = WireError;

    fn try_from(configuration: v1::NamespaceConfiguration) -> Result<Self, WireError> {
        let read = |pairs: Vec<v1::Annotation>| {
            let pairs = pairs.into_iter();
            pairs.map(|pair| (pair.name, pair.value)).collect()
        };
        let read = Self {
            labels: read(configuration.labels),
            annotations: read(configuration.annotations),
        };
        // The hub must not send the keys that mark a namespace as Krypton's.
        read.check()
            .map_err(|_| WireError::Name("the configuration of namespaces"))?;
        Ok(read)
    }
}

impl From<&DesiredDeployment> for v1::DeploymentOrder {
    fn from(order: &DesiredDeployment) -> Self {
        let DesiredDeployment {
            namespace,
            name,
            uid,
            generation,
            created,
            remove,
            orphan,
            paused,
            requested,
            drift,
            annotations,
        } = order.clone();
        Self {
            namespace,
            name,
            uid,
            generation,
            created,
            remove,
            orphan,
            paused,
            requested,
            drift: drift.map(Into::into),
            annotations: annotations
                .into_iter()
                .map(|(name, value)| v1::Annotation { name, value })
                .collect(),
        }
    }
}

impl TryFrom<v1::DeploymentOrder> for DesiredDeployment {
    type Error = WireError;

    fn try_from(order: v1::DeploymentOrder) -> Result<Self, WireError> {
        let v1::DeploymentOrder {
            namespace,
            name,
            uid,
            generation,
            created,
            remove,
            orphan,
            paused,
            requested,
            drift,
            annotations,
        } = order;
        if namespace.is_empty() || namespace.len() > LABEL_MAX {
            return Err(WireError::Name("a deployment's namespace"));
        }
        if name.is_empty() || name.len() > SUBDOMAIN_MAX {
            return Err(WireError::Name("a deployment's name"));
        }
        // The UID becomes a label value.
        if uid.is_empty() || uid.len() > LABEL_MAX {
            return Err(WireError::Name("a deployment's UID"));
        }
        Ok(Self {
            namespace,
            name,
            uid,
            generation,
            created,
            remove,
            orphan,
            paused,
            requested,
            drift: drift.map(DriftPolicy::try_from).transpose()?,
            annotations: annotations
                .into_iter()
                .map(|annotation| (annotation.name, annotation.value))
                .collect(),
        })
    }
}

impl From<&PlacedTenant> for v1::PlacedOrder {
    fn from(order: &PlacedTenant) -> Self {
        let PlacedTenant {
            namespace,
            name,
            uid,
            generation,
            spec:
                PlacedSpec {
                    workspace,
                    values,
                    service_account_name,
                },
            remove,
            adopt,
            paused,
            requested,
            former_uid,
        } = order.clone();
        let values = values.map(|values| serde_json::Value::Object(values).to_string().into());
        Self {
            namespace,
            name,
            uid,
            generation,
            workspace,
            values,
            remove,
            adopt,
            paused,
            requested,
            former_uid,
            service_account_name,
        }
    }
}

impl TryFrom<v1::PlacedOrder> for PlacedTenant {
    type Error = WireError;

    fn try_from(order: v1::PlacedOrder) -> Result<Self, WireError> {
        let v1::PlacedOrder {
            namespace,
            name,
            uid,
            generation,
            workspace,
            values,
            remove,
            adopt,
            paused,
            requested,
            former_uid,
            service_account_name,
        } = order;
        if !is_dns_label(&namespace) {
            return Err(WireError::Name("a placed Tenant's namespace"));
        }
        if !is_dns_subdomain(&name) {
            return Err(WireError::Name("a placed Tenant's name"));
        }
        if uid.is_empty() || uid.len() > LABEL_MAX {
            return Err(WireError::Name("a placed Tenant's UID"));
        }
        let read = |values: prost::bytes::Bytes| serde_json::from_slice(&values);
        let values = values.map(read).transpose().map_err(WireError::Values)?;
        Ok(Self {
            namespace,
            name,
            uid,
            generation,
            spec: PlacedSpec {
                workspace,
                values,
                service_account_name,
            },
            remove,
            adopt,
            paused,
            requested,
            former_uid,
        })
    }
}

impl TryFrom<v1::Desired> for DesiredState {
    type Error = WireError;

    fn try_from(desired: v1::Desired) -> Result<Self, WireError> {
        let digest = desired.digest.clone();
        let read = desired.unchecked()?;
        // An unknown field would change the digest. The member must not act on a partly understood state.
        if read.digest() == digest {
            Ok(read)
        } else {
            Err(WireError::Digest)
        }
    }
}

impl v1::Desired {
    /// Reads the desired state without a digest check.
    pub(crate) fn unchecked(self) -> Result<DesiredState, WireError> {
        let Self {
            version,
            chart,
            paused,
            retire,
            digest: _,
            drift,
            chart_crds,
            tenant_values,
            wait,
            delete_cert_manager_crds,
            deployments,
            placed,
            allow_chart_skip,
            namespaces,
            no_cross_namespace_refs,
            default_service_account,
        } = self;
        let chart_crds = match chart_crds.as_str() {
            "" => CrdPolicy::default(),
            word => {
                let policy = word.parse();
                policy.map_err(|_| WireError::Name("the policy for CRDs"))?
            }
        };
        let wait = match wait.as_str() {
            "" => WaitPolicy::default(),
            word => {
                let policy = word.parse();
                policy.map_err(|_| WireError::Name("what is waited for"))?
            }
        };
        let drift = drift.map(DriftPolicy::try_from).transpose()?;
        let chart = chart.ok_or(WireError::Missing("the chart"))?;
        Ok(DesiredState {
            version: version
                .ok_or(WireError::Missing("the version of the desired state"))?
                .into(),
            chart: ChartState {
                repo: chart.repo,
                name: chart.name,
                version: chart.version,
                install_crds: chart.install_crds,
                values: serde_json::from_slice(&chart.values).map_err(WireError::Values)?,
                confidential: chart.confidential.map(|confidential| Confidential {
                    salt: confidential.salt,
                    paths: confidential.paths,
                }),
                pinned: chart.pinned,
            },
            paused,
            retire,
            drift: drift.unwrap_or_default(),
            chart_crds,
            tenant_values,
            handling: Handling {
                wait,
                delete_cert_manager_crds,
                allow_chart_skip,
            },
            lockdown: Lockdown {
                no_cross_namespace_refs,
                default_service_account,
            },
            namespaces: namespaces
                .map(NamespaceConfiguration::try_from)
                .transpose()?
                .unwrap_or_default(),
            deployments: deployments
                .into_iter()
                .map(DesiredDeployment::try_from)
                .collect::<Result<_, _>>()?,
            placed: placed
                .into_iter()
                .map(PlacedTenant::try_from)
                .collect::<Result<_, _>>()?,
        })
    }
}

impl From<DriftPolicy> for v1::Drift {
    fn from(drift: DriftPolicy) -> Self {
        Self {
            mode: drift.mode.to_string(),
            interval_seconds: drift.interval_seconds,
        }
    }
}

impl TryFrom<v1::Drift> for DriftPolicy {
    type Error = WireError;

    fn try_from(drift: v1::Drift) -> Result<Self, WireError> {
        let mode = drift.mode.parse();
        Ok(Self {
            mode: mode.map_err(|_| WireError::Name("the mode of drift"))?,
            interval_seconds: drift.interval_seconds,
        })
    }
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
        Some((self.version?.into(), text(self.digest, TEXT_MAX)))
    }
}

impl From<&MemberReport> for v1::Member {
    fn from(report: &MemberReport) -> Self {
        let MemberReport {
            synced,
            ready,
            writing,
            holder,
            connected,
            problem,
            applied: acted_on,
            ahead,
            not_restored,
        } = report;
        Self {
            synced: *synced,
            ready: *ready,
            writing: *writing,
            holder: holder.clone(),
            connected: *connected,
            problem: problem.clone().map(|problem| text(problem, TEXT_MAX)),
            applied: acted_on.as_ref().map(applied),
            ahead: ahead.map(Into::into),
            not_restored: not_restored.clone().map(|why| text(why, TEXT_MAX)),
        }
    }
}

impl From<v1::Member> for MemberReport {
    fn from(member: v1::Member) -> Self {
        let v1::Member {
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
            holder: holder.map(|holder| text(holder, SUBDOMAIN_MAX)),
            connected,
            problem: problem.map(|problem| text(problem, TEXT_MAX)),
            applied: applied.and_then(v1::Applied::read),
            ahead: ahead.map(Into::into),
            not_restored: not_restored.map(|why| text(why, TEXT_MAX)),
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
        if self.namespace.is_empty() || self.namespace.len() > LABEL_MAX {
            return Err(WireError::Name("a Tenant's namespace"));
        }
        if self.name.is_empty() || self.name.len() > SUBDOMAIN_MAX {
            return Err(WireError::Name("a Tenant's name"));
        }
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

    fn read(self, what: &'static str) -> Result<ClusterState, WireError> {
        Ok(ClusterState {
            ready: self.ready.ok_or(WireError::Missing(what))?.into(),
            progress: self.progress.map(Into::into),
            error: self.error.map(Into::into),
        })
    }
}

impl v1::Next {
    fn new(next: Next) -> Self {
        Self {
            what: next.step.as_str().to_owned(),
            at: next.second(),
            attempts: next.attempts,
        }
    }

    /// Returns `None` if the step is unknown or the time is out of range.
    fn read(&self) -> Option<Next> {
        Next::at_second(Step::of(&self.what)?, self.at, self.attempts)
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
                deeds: report.deeds.iter().map(v1::Deed::new).collect(),
            }),
        }
    }

    /// Returns the key of the deployment and its report, if any.
    pub fn read(self) -> Result<(DeploymentKey, Option<DeploymentReport>), WireError> {
        if self.namespace.is_empty() || self.namespace.len() > LABEL_MAX {
            return Err(WireError::Name("a deployment's namespace"));
        }
        if self.name.is_empty() || self.name.len() > SUBDOMAIN_MAX {
            return Err(WireError::Name("a deployment's name"));
        }
        let key = DeploymentKey {
            namespace: self.namespace,
            name: self.name,
        };
        let Some(said) = self.state else {
            return Ok((key, None));
        };
        if said.uid.len() > LABEL_MAX {
            return Err(WireError::Name("a deployment's UID"));
        }
        let what = "a deployment's state";
        let state = said.state.ok_or(WireError::Missing(what))?;
        let report = DeploymentReport {
            uid: said.uid,
            observed_generation: state.observed_generation,
            gone: said.gone,
            applied_chart: state.applied_chart.clone(),
            state: state.read(what)?,
            deeds: said.deeds.into_iter().map(v1::Deed::read).collect(),
        };
        Ok((key, Some(report.trimmed())))
    }
}

impl v1::Deed {
    fn new(deed: &ReportedEvent) -> Self {
        Self {
            at: deed.at,
            reason: deed.reason.clone(),
            message: deed.message.clone(),
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
        if self.namespace.is_empty() || self.namespace.len() > LABEL_MAX {
            return Err(WireError::Name("a placed Tenant's namespace"));
        }
        if self.name.is_empty() || self.name.len() > SUBDOMAIN_MAX {
            return Err(WireError::Name("a placed Tenant's name"));
        }
        let key = TenantKey {
            namespace: self.namespace,
            name: self.name,
        };
        let Some(said) = self.state else {
            return Ok((key, None));
        };
        if said.uid.len() > LABEL_MAX {
            return Err(WireError::Name("a placed Tenant's UID"));
        }
        let report = PlacedReport {
            uid: said.uid,
            observed_generation: said.observed_generation,
            gone: said.gone,
            state: said
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
fn text(mut text: String, max: usize) -> String {
    text.truncate(text.floor_char_boundary(max));
    text
}

#[cfg(test)]
mod tests {
    use krypton_types::desired::drift::DriftMode;
    use proptest::prelude::*;

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

    #[test]
    fn partial_placed_tenant_order_is_rejected() {
        let wire = v1::Desired::from(&desired());
        let half = |change: fn(&mut v1::Desired)| {
            let mut half = wire.clone();
            change(&mut half);
            DesiredState::try_from(half)
        };
        for change in [
            (|desired| desired.placed.clear()) as fn(&mut v1::Desired),
            |desired| desired.placed[0].remove = false,
            |desired| desired.placed[0].adopt = false,
            |desired| desired.placed[0].values = None,
        ] {
            assert!(matches!(half(change), Err(WireError::Digest)));
        }
        for change in [
            (|desired| desired.placed[0].uid.clear()) as fn(&mut v1::Desired),
            |desired| desired.placed[0].namespace = "../a".to_owned(),
            |desired| desired.placed[0].name.clear(),
        ] {
            assert!(matches!(half(change), Err(WireError::Name(_))));
        }
        let rubbish = half(|desired| desired.placed[0].values = Some("[]".into()));
        assert!(matches!(rubbish, Err(WireError::Values(_))));
    }

    #[test]
    fn partial_deployment_order_is_rejected() {
        let wire = v1::Desired::from(&desired());
        let mut without = wire.clone();
        without.deployments.clear();
        let mut installs = wire.clone();
        installs.deployments[0].remove = false;
        for half in [without, installs] {
            assert!(matches!(
                DesiredState::try_from(half),
                Err(WireError::Digest)
            ));
        }
        let mut nameless = wire;
        nameless.deployments[0].uid.clear();
        assert!(matches!(
            DesiredState::try_from(nameless),
            Err(WireError::Name(_))
        ));
    }

    #[test]
    fn desired_state_with_lost_retire_is_rejected() {
        let retire = DesiredState {
            retire: true,
            ..desired()
        };
        let wire = v1::Desired::from(&retire);
        assert_eq!(DesiredState::try_from(wire.clone()).unwrap(), retire);
        // The receiver does not know the field.
        let half = v1::Desired {
            retire: false,
            ..wire
        };
        assert!(matches!(
            DesiredState::try_from(half),
            Err(WireError::Digest)
        ));
    }

    #[test]
    fn root_digests_round_trip_and_malformed_are_rejected() {
        let all = RootDigest::of_all(&[b"a", b"b"]);
        let said = v1::Trusts::new(&all);
        assert_eq!(said.read().unwrap(), all);
        let mut cut = said.clone();
        cut.sha256[1].truncate(31);
        assert!(matches!(cut.read(), Err(WireError::Name(_))));
        let many = v1::Trusts {
            sha256: vec![said.sha256[0].clone(); ROOTS_MAX + 1],
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
    fn a_desired_state_arrives_as_it_was_sent() {
        let sent = v1::Desired::from(&desired());
        assert_eq!(DesiredState::try_from(sent).unwrap(), desired());
    }

    #[test]
    fn desired_state_with_wrong_digest_is_rejected() {
        let mut sent = v1::Desired::from(&desired());
        sent.paused = false;
        assert!(matches!(
            DesiredState::try_from(sent),
            Err(WireError::Digest)
        ));
        let mut sent = v1::Desired::from(&desired());
        sent.drift = None;
        assert!(matches!(
            DesiredState::try_from(sent),
            Err(WireError::Digest)
        ));
        let mut sent = v1::Desired::from(&desired());
        if let Some(drift) = &mut sent.drift {
            drift.mode = "mend".to_owned();
        }
        assert!(matches!(
            DesiredState::try_from(sent),
            Err(WireError::Name(_))
        ));
        let mut sent = v1::Desired::from(&desired());
        sent.namespaces = None;
        assert!(matches!(
            DesiredState::try_from(sent),
            Err(WireError::Digest)
        ));
        let mut sent = v1::Desired::from(&desired());
        if let Some(namespaces) = &mut sent.namespaces {
            namespaces.labels[0].name = "mesh.openkcm.io/created-for".to_owned();
        }
        assert!(matches!(
            DesiredState::try_from(sent),
            Err(WireError::Name(_))
        ));
        let mut sent = v1::Desired::from(&desired());
        sent.tenant_values = false;
        assert!(matches!(
            DesiredState::try_from(sent),
            Err(WireError::Digest)
        ));
        let mut sent = v1::Desired::from(&desired());
        if let Some(chart) = &mut sent.chart {
            chart.confidential = None;
        }
        assert!(matches!(
            DesiredState::try_from(sent),
            Err(WireError::Digest)
        ));
        let mut sent = v1::Desired::from(&desired());
        sent.chart = None;
        assert!(matches!(
            DesiredState::try_from(sent),
            Err(WireError::Missing(_))
        ));
        let mut sent = v1::Desired::from(&desired());
        if let Some(chart) = &mut sent.chart {
            chart.values = "[]".into();
        }
        assert!(matches!(
            DesiredState::try_from(sent),
            Err(WireError::Values(_))
        ));
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
        let said = TenantReport {
            observed_generation: 1,
            applied_chart: String::new(),
            state,
            next: None,
        }
        .trimmed();
        let (_, heard) = v1::Tenant::new(&key, Some(&said)).read().unwrap();
        let part = |report| krypton_types::report_digest::part(&key, report);
        assert_eq!(part(&said), part(&heard.unwrap()));
    }

    #[test]
    fn long_text_is_truncated_at_character_boundary() {
        assert_eq!(text("äää".to_owned(), 3), "ä");
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
            let next = next.and_then(|(step, at, attempts)| Next::at_second(Step::ALL[step], at, attempts));
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
                deeds: vec![ReportedEvent { at: 1, reason: "DriftHealed".to_owned(), message: "put right".to_owned() }],
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
            prop_assert_eq!(MemberReport::from(v1::Member::from(&report)), report);
        }
    }
}

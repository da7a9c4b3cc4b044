//! Desired state of one member, and the order of desired states.

pub mod crd_policy;
pub mod drift;
pub mod handling;
pub mod lockdown;
pub mod namespaces;

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::deployment::DesiredDeployment;
use crate::desired::crd_policy::CrdPolicy;
use crate::desired::drift::DriftPolicy;
use crate::desired::handling::Handling;
use crate::desired::lockdown::Lockdown;
use crate::desired::namespaces::NamespaceConfiguration;
use crate::fingerprint;
use crate::placed_tenant::PlacedTenant;
use crate::redact::url_shown;
use crate::values::{self, merge};

/// The value that `install_crds` adds.
const INSTALL_CRDS: &str = "installCRDs";

/// The chart, its version and its values. One for each fleet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ChartState {
    /// Repository URL. Empty if `name` is the path of a local `.tgz` file.
    pub repo: String,
    pub name: String,
    /// Exact version. Empty means the newest stable version, as in Helm.
    pub version: String,
    /// Adds the value `installCRDs: true`, like the flag `-chart-install-crds` of krypton-operator.
    pub install_crds: bool,
    pub values: Map<String, Value>,
    /// Set if some of the values are secrets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confidential: Option<Confidential>,
    /// The version to fetch with its digest, as `1.2.3@sha256:…`. Empty while the hub has not resolved it. `None`
    /// means `version`. No fingerprint or digest contains it, so it changes no release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned: Option<String>,
}

/// Metadata of values that come from Secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confidential {
    /// A random text of the fleet, part of every digest over the values. It prevents a reader of a digest from
    /// guessing a short password.
    pub salt: String,
    /// JSON pointers to the values that must not be shown.
    pub paths: Vec<String>,
}

impl ChartState {
    /// Returns the text of `status.lastAppliedChart`: `<repo>/<name>:<version>`, without credentials.
    pub fn applied_name(&self) -> String {
        let repo = url_shown(&self.repo);
        let repo = repo.trim_end_matches('/');
        let separator = if repo.is_empty() { "" } else { "/" };
        let name = match self.name.contains("://") {
            true => url_shown(&self.name),
            false => self.name.clone(),
        };
        format!("{repo}{separator}{name}:{}", self.version)
    }

    /// Returns the version to fetch. While the digest is unknown, this is a version range, for which members fetch
    /// nothing.
    pub fn version_to_fetch(&self) -> Cow<'_, str> {
        match self.pinned.as_deref() {
            None => Cow::Borrowed(&self.version),
            Some("") if self.version.is_empty() => Cow::Borrowed("*"),
            Some("") if is_exact(&self.version) => Cow::Owned(format!("={}", self.version)),
            Some("") => Cow::Borrowed(&self.version),
            Some(pinned) => Cow::Borrowed(pinned),
        }
    }

    /// Returns the values that Helm gets.
    pub fn helm_values(&self) -> Map<String, Value> {
        let mut values = self.values.clone();
        if self.install_crds {
            values.insert(INSTALL_CRDS.to_owned(), Value::Bool(true));
        }
        values
    }

    /// Returns the chart with another layer over all values. The layer can override `installCRDs` too.
    #[must_use]
    pub fn overlaid(&self, over: &Map<String, Value>) -> Self {
        let overrides_install_crds = over.contains_key(INSTALL_CRDS);
        let mut next = self.clone();
        if overrides_install_crds {
            next.values = self.helm_values();
            next.install_crds = false;
        }
        merge(&mut next.values, over);
        next
    }

    /// Returns JSON pointers to the Helm values that must not be shown.
    pub fn secret_paths(&self) -> &[String] {
        let confidential = self.confidential.as_ref();
        confidential.map_or(&[], |confidential| &confidential.paths)
    }

    /// Returns the full fingerprint over all inputs of Helm. It is 63 characters long, to fit into a label.
    pub fn fingerprint(&self) -> String {
        let mut canonical = serde_json::json!({
            "repo": self.repo,
            "name": self.name,
            "version": self.version,
            "values": self.helm_values(),
        });
        if let Some(confidential) = &self.confidential {
            canonical["salt"] = Value::String(confidential.salt.clone());
        }
        let mut digest = fingerprint::sha256_hex(canonical.to_string().as_bytes());
        digest.truncate(63);
        digest
    }

    /// Returns whether `annotation` is the fingerprint that krypton-operator writes for this chart state. That
    /// fingerprint never contains `installCRDs` alone.
    pub fn is_original_fingerprint(&self, annotation: &str) -> bool {
        let without_values = fingerprint::original(&self.repo, &self.name, &self.version);
        (self.values.is_empty() && annotation == without_values)
            || annotation
                == fingerprint::original_with_values(
                    &self.repo,
                    &self.name,
                    &self.version,
                    &self.helm_values(),
                )
    }
}

fn is_exact(version: &str) -> bool {
    let version = version.strip_prefix('v').unwrap_or(version);
    semver::Version::parse(version).is_ok()
}

/// Version of a desired state. The later epoch wins, then the higher generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version {
    pub epoch: u64,
    pub generation: u64,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.epoch, self.generation)
    }
}

/// Complete desired state of one member.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DesiredState {
    pub version: Version,
    pub chart: ChartState,
    /// `spec.paused` of the member: the member writes status only.
    pub paused: bool,
    /// Decommission the member: uninstall each of its releases, regardless of `chart`.
    #[serde(default, skip_serializing_if = "krypton_crds::is_default")]
    pub retire: bool,
    #[serde(default, skip_serializing_if = "krypton_crds::is_default")]
    pub drift: DriftPolicy,
    #[serde(default, skip_serializing_if = "krypton_crds::is_default")]
    pub chart_crds: CrdPolicy,
    /// Whether `spec.values` of a Tenant has an effect.
    #[serde(default, skip_serializing_if = "krypton_crds::is_default")]
    pub tenant_values: bool,
    #[serde(default, flatten)]
    pub handling: Handling,
    #[serde(default, skip_serializing_if = "krypton_crds::is_default")]
    pub lockdown: Lockdown,
    /// Labels and annotations of the namespaces that Krypton creates for workspaces.
    #[serde(
        default,
        rename = "namespaceConfiguration",
        skip_serializing_if = "NamespaceConfiguration::is_empty"
    )]
    pub namespaces: NamespaceConfiguration,
    /// Orders by namespace and name. Releases without an order stay unchanged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub deployments: Vec<DesiredDeployment>,
    /// Orders by namespace and name. Tenants without an order stay unchanged.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub placed: Vec<PlacedTenant>,
}

impl DesiredState {
    /// Size limit in bytes. The member stores its desired state in one Secret, which holds 1 MiB.
    pub const MAX_BYTES: usize = 1_040_000;

    /// Size in bytes as stored on the member.
    pub fn size(&self) -> usize {
        values::size(self)
    }

    /// Returns the chart for a Tenant with its own values, if the fleet allows them.
    pub fn chart_with(&self, tenant_values: Option<&Map<String, Value>>) -> Cow<'_, ChartState> {
        match tenant_values.filter(|values| self.tenant_values && !values.is_empty()) {
            Some(values) => Cow::Owned(self.chart.overlaid(values)),
            None => Cow::Borrowed(&self.chart),
        }
    }

    /// Returns a digest of the content, without the version and the pinned chart version. Fields with their default
    /// value are not part of it, so agents that do not know a field compute the same digest.
    pub fn digest(&self) -> String {
        // Serialization into memory does not fail.
        let mut content = serde_json::to_value(self).unwrap_or_default();
        if let Some(content) = content.as_object_mut() {
            content.remove("version");
        }
        if let Some(chart) = content["chart"].as_object_mut() {
            chart.remove("pinned");
        }
        fingerprint::sha256_hex(content.to_string().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;
    use crate::desired::drift::DriftMode;
    use crate::desired::handling::{Remediation, WaitPolicy};

    fn chart() -> ChartState {
        ChartState {
            repo: "https://charts.jetstack.io".to_owned(),
            name: "cert-manager".to_owned(),
            version: "1.19.1".to_owned(),
            install_crds: true,
            ..ChartState::default()
        }
    }

    #[test]
    fn applied_name_holds_no_credential() {
        assert_eq!(
            chart().applied_name(),
            "https://charts.jetstack.io/cert-manager:1.19.1"
        );
        let with_source = |repo: &str, name: &str| ChartState {
            repo: repo.to_owned(),
            name: name.to_owned(),
            ..chart()
        };
        let with_login = with_source("https://me:pw@a.org/charts/?key=1", "small");
        assert_eq!(
            with_login.applied_name(),
            "https://a.org/charts/small:1.19.1"
        );
        let oci = with_source("", "oci://me:pw@a.org/small?key=1");
        assert_eq!(oci.applied_name(), "oci://a.org/small:1.19.1");
    }

    #[test]
    fn pinned_content_is_fetched_and_changes_no_fingerprint() {
        let with = |version: &str, pinned: Option<&str>| ChartState {
            version: version.to_owned(),
            pinned: pinned.map(ToOwned::to_owned),
            ..chart()
        };
        for (version, pinned, fetched) in [
            ("1.2.3", None, "1.2.3"),
            ("", None, ""),
            ("1.2.3", Some(""), "=1.2.3"),
            ("", Some(""), "*"),
            ("rubbish", Some(""), "rubbish"),
            ("1.2.3", Some("1.2.3@sha256:ab"), "1.2.3@sha256:ab"),
            ("", Some("1.2.3@sha256:ab"), "1.2.3@sha256:ab"),
        ] {
            let state = with(version, pinned);
            assert_eq!(state.version_to_fetch(), fetched);
            let plain = with(version, None);
            assert_eq!(state.fingerprint(), plain.fingerprint());
            assert_eq!(state.applied_name(), plain.applied_name());
        }
    }

    #[test]
    fn original_fingerprint_follows_values_not_install_crds() {
        let without_values = "dd782c04db309dcc54c116da69b3f09bdae53e49d4d4e087fb6bce3a92e80a8d";
        let mut chart = chart();
        assert!(chart.is_original_fingerprint(without_values));
        chart.values.insert("replicaCount".to_owned(), 1.into());
        assert!(!chart.is_original_fingerprint(without_values));
        assert!(chart.is_original_fingerprint(
            "5bae5844d6be0862a748a6306452149c67b1dbaf80e1cc8d2c05718d7c195d10"
        ));
        chart.values.clear();
        chart.install_crds = false;
        assert!(chart.is_original_fingerprint(without_values));
    }

    #[test]
    fn every_helm_input_changes_chart_fingerprint() {
        let base = chart().fingerprint();
        assert_eq!(base.len(), 63);
        let mut changed = vec![
            ChartState {
                version: "1.19.2".to_owned(),
                ..chart()
            },
            ChartState {
                name: "other".to_owned(),
                ..chart()
            },
            ChartState {
                repo: "https://example.org".to_owned(),
                ..chart()
            },
            ChartState {
                install_crds: false,
                ..chart()
            },
        ];
        let mut values = chart();
        values.values.insert("a".to_owned(), Value::Null);
        changed.push(values);
        for other in changed {
            assert_ne!(base, other.fingerprint(), "{other:?}");
        }
    }

    fn plain() -> DesiredState {
        DesiredState {
            chart: chart(),
            ..DesiredState::default()
        }
    }

    #[test]
    fn unset_policies_stay_out_of_digest_and_record() {
        // As computed by an agent without drift detection.
        let content = serde_json::json!({ "chart": plain().chart, "paused": false });
        let expected = fingerprint::sha256_hex(content.to_string().as_bytes());
        assert_eq!(plain().digest(), expected);
        let recorded = serde_json::to_value(plain()).unwrap();
        for unset in [
            "drift",
            "wait",
            "lockdown",
            "allowChartSkip",
            "retries",
            "remediation",
            "historyMax",
            "namespaceConfiguration",
            "deployments",
            "placed",
        ] {
            assert!(recorded.get(unset).is_none(), "{unset}: {recorded}");
        }
    }

    #[test]
    fn each_policy_changes_digest_and_survives_record() {
        let order = DesiredDeployment {
            name: "acme".to_owned(),
            uid: "uid-1".to_owned(),
            ..DesiredDeployment::default()
        };
        let tenant = PlacedTenant {
            name: "acme".to_owned(),
            uid: "uid-1".to_owned(),
            ..PlacedTenant::default()
        };
        let removed_order = DesiredDeployment {
            remove: true,
            ..order.clone()
        };
        let removed_tenant = PlacedTenant {
            remove: true,
            ..tenant.clone()
        };
        let confidential = Confidential {
            salt: "s".to_owned(),
            paths: vec!["/a".to_owned()],
        };
        let labels = BTreeMap::from([("team".to_owned(), "a".to_owned())]);
        let changes: [&dyn Fn(&mut DesiredState); 17] = [
            &|_| {},
            &|state| state.drift.mode = DriftMode::Heal,
            &|state| state.chart_crds = CrdPolicy::CreateReplace,
            &|state| state.tenant_values = true,
            &|state| state.chart.confidential = Some(confidential.clone()),
            &|state| state.handling.wait = WaitPolicy::None,
            &|state| state.handling.delete_cert_manager_crds = true,
            &|state| state.handling.allow_chart_skip = true,
            &|state| state.handling.retries = Some(0),
            &|state| state.handling.remediation = Remediation::Rollback,
            &|state| state.handling.history_max = 10,
            &|state| state.lockdown.no_cross_namespace_refs = true,
            &|state| state.namespaces.labels.clone_from(&labels),
            &|state| state.deployments = vec![order.clone()],
            &|state| state.deployments = vec![removed_order.clone()],
            &|state| state.placed = vec![tenant.clone()],
            &|state| state.placed = vec![removed_tenant.clone()],
        ];
        let mut digests = BTreeSet::new();
        for (number, change) in changes.iter().enumerate() {
            let mut state = plain();
            change(&mut state);
            assert!(digests.insert(state.digest()), "{number}");
            let recorded = serde_json::to_value(&state).unwrap();
            let read: DesiredState = serde_json::from_value(recorded).unwrap();
            assert_eq!(read, state);
        }
        let mut heals = plain();
        heals.drift.mode = DriftMode::Heal;
        assert_eq!(heals.chart.fingerprint(), plain().chart.fingerprint());
    }

    #[test]
    fn pinned_version_changes_no_digest() {
        let mut pinned = plain();
        pinned.chart.pinned = Some("1.19.1@sha256:ab".to_owned());
        // An agent that does not know this field keeps its behaviour.
        assert_eq!(pinned.digest(), plain().digest());
    }

    #[test]
    fn layer_overrides_only_values_and_install_crds() {
        let map = |value: Value| match value {
            Value::Object(map) => map,
            other => panic!("{other}"),
        };
        let mut fleet = chart();
        fleet.values = map(serde_json::json!({"a": {"x": 1}, "b": [1, 2]}));
        let overlaid = fleet.overlaid(&map(serde_json::json!({"a": {"y": 2}, "b": [3]})));
        assert_eq!(
            Value::Object(overlaid.helm_values()),
            serde_json::json!({"a": {"x": 1, "y": 2}, "b": [3], "installCRDs": true})
        );
        let without = fleet.overlaid(&map(serde_json::json!({"installCRDs": false})));
        assert_eq!(without.helm_values()["installCRDs"], false);
        assert_ne!(without.fingerprint(), fleet.fingerprint());
        // A layer that repeats present values causes no upgrade.
        let same = fleet.overlaid(&map(
            serde_json::json!({"a": {"x": 1}, "installCRDs": true}),
        ));
        assert_eq!(same.fingerprint(), fleet.fingerprint());
        assert_eq!(fleet.overlaid(&Map::new()), fleet);
    }

    #[test]
    fn tenant_values_apply_only_where_fleet_allows() {
        let own: Map<String, Value> = [("a".to_owned(), Value::from(1))].into_iter().collect();
        let mut desired = plain();
        assert_eq!(*desired.chart_with(Some(&own)), chart());
        desired.tenant_values = true;
        assert_eq!(desired.chart_with(Some(&own)).helm_values()["a"], 1);
        assert_eq!(*desired.chart_with(Some(&Map::new())), chart());
        assert_eq!(*desired.chart_with(None), chart());
    }

    #[test]
    fn confidential_digest_depends_on_salt_not_paths() {
        let salted = |salt: &str, paths: &[&str]| ChartState {
            confidential: Some(Confidential {
                salt: salt.to_owned(),
                paths: paths.iter().map(|path| (*path).to_owned()).collect(),
            }),
            ..chart()
        };
        assert_ne!(salted("a", &[]).fingerprint(), chart().fingerprint());
        assert_ne!(
            salted("a", &[]).fingerprint(),
            salted("b", &[]).fingerprint()
        );
        assert_eq!(
            salted("a", &["/x"]).fingerprint(),
            salted("a", &["/y"]).fingerprint()
        );
    }

    #[test]
    fn a_later_epoch_wins_over_a_higher_generation() {
        let old = Version {
            epoch: 1,
            generation: 9,
        };
        for (epoch, generation) in [(2, 1), (1, 10)] {
            assert!(Version { epoch, generation } > old);
        }
    }
}

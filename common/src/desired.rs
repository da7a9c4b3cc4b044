//! Desired state: what one member is to run, and its place in the order of all desired states.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::crd_policy::CrdPolicy;
use crate::drift::DriftPolicy;
use crate::fingerprint;
use crate::handling::Handling;

/// Which chart, at which version, with which values. One per fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChartState {
    /// Repository URL, or empty when `name` is the path of a local `.tgz`.
    pub repo: String,
    pub name: String,
    /// Exact version; empty means the newest stable one, as in Helm.
    pub version: String,
    /// Adds the value `installCRDs: true`, as the original's `-chart-install-crds` did.
    pub install_crds: bool,
    pub values: Map<String, Value>,
}

impl ChartState {
    /// What `status.lastAppliedChart` says: `<repo>/<name>:<version>` (reference 1.3).
    pub fn applied_name(&self) -> String {
        let repo = self.repo.trim_end_matches('/');
        let separator = if repo.is_empty() { "" } else { "/" };
        format!("{repo}{separator}{}:{}", self.name, self.version)
    }

    /// The values helm gets.
    pub fn helm_values(&self) -> Map<String, Value> {
        let mut values = self.values.clone();
        if self.install_crds {
            values.insert("installCRDs".to_owned(), Value::Bool(true));
        }
        values
    }

    /// The full fingerprint, over everything that helm is given. Goes to a label: 63 characters.
    pub fn fingerprint(&self) -> String {
        let canonical = serde_json::json!({
            "repo": self.repo,
            "name": self.name,
            "version": self.version,
            "values": self.helm_values(),
        });
        let mut digest = fingerprint::sha256_hex(canonical.to_string().as_bytes());
        digest.truncate(63);
        digest
    }

    /// Whether `annotation` is what the original operator would have written for this chart state.
    /// `installCRDs` alone was never part of it (reference 1.4).
    pub fn is_original_fingerprint(&self, annotation: &str) -> bool {
        let plain = fingerprint::original(&self.repo, &self.name, &self.version);
        (self.values.is_empty() && annotation == plain)
            || annotation
                == fingerprint::original_with_values(
                    &self.repo,
                    &self.name,
                    &self.version,
                    &self.helm_values(),
                )
    }
}

/// The order of desired states: a later epoch wins, then a higher generation (design §3, rule 3).
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

/// Everything a member is to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DesiredState {
    pub version: Version,
    pub chart: ChartState,
    /// `spec.paused` of the member: status is written, nothing else.
    pub paused: bool,
    /// The member leaves the fleet and its releases with it: each is uninstalled, whatever `chart` says.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub retire: bool,
    #[serde(default, skip_serializing_if = "DriftPolicy::is_default")]
    pub drift: DriftPolicy,
    #[serde(
        default,
        rename = "chartCrds",
        skip_serializing_if = "CrdPolicy::is_default"
    )]
    pub chart_crds: CrdPolicy,
    #[serde(default, flatten)]
    pub handling: Handling,
}

impl DesiredState {
    /// A digest of the content, without its version. What is as it was before there was such a field
    /// is not part of it, so that agents of that time agree.
    pub fn digest(&self) -> String {
        let mut content = serde_json::json!({ "chart": self.chart, "paused": self.paused });
        // An agent that does not know the order finds another digest, and does nothing.
        if self.retire {
            content["retire"] = Value::Bool(true);
        }
        if !self.drift.is_default() {
            content["drift"] = serde_json::json!(self.drift);
        }
        if !self.chart_crds.is_default() {
            content["chartCrds"] = serde_json::json!(self.chart_crds);
        }
        if !self.handling.wait.is_default() {
            content["wait"] = serde_json::json!(self.handling.wait);
        }
        if self.handling.delete_cert_manager_crds {
            content["deleteCertManagerCrds"] = Value::Bool(true);
        }
        fingerprint::sha256_hex(content.to_string().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drift::DriftMode;
    use crate::handling::WaitPolicy;

    fn chart() -> ChartState {
        ChartState {
            repo: "https://charts.jetstack.io".to_owned(),
            name: "cert-manager".to_owned(),
            version: "1.19.1".to_owned(),
            install_crds: true,
            values: Map::new(),
        }
    }

    #[test]
    fn the_originals_annotation_is_recognised_with_and_without_install_crds() {
        let annotation = "dd782c04db309dcc54c116da69b3f09bdae53e49d4d4e087fb6bce3a92e80a8d";
        assert!(chart().is_original_fingerprint(annotation));
        assert!(
            ChartState {
                install_crds: false,
                ..chart()
            }
            .is_original_fingerprint(annotation)
        );
    }

    #[test]
    fn values_that_the_original_did_not_have_are_not_covered_by_its_annotation() {
        let mut with_values = chart();
        with_values
            .values
            .insert("replicaCount".to_owned(), 1.into());
        assert!(!with_values.is_original_fingerprint(
            "dd782c04db309dcc54c116da69b3f09bdae53e49d4d4e087fb6bce3a92e80a8d"
        ));
        assert!(with_values.is_original_fingerprint(
            "5bae5844d6be0862a748a6306452149c67b1dbaf80e1cc8d2c05718d7c195d10"
        ));
    }

    #[test]
    fn every_input_of_helm_changes_the_full_fingerprint_and_it_fits_a_label() {
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

    #[test]
    fn a_policy_is_in_the_digest_and_the_record_only_where_it_is_set_and_never_in_the_chart() {
        let plain = DesiredState {
            version: Version::default(),
            chart: chart(),
            paused: false,
            retire: false,
            drift: DriftPolicy::default(),
            chart_crds: CrdPolicy::default(),
            handling: Handling::default(),
        };
        // As an agent has it that knows nothing of drift.
        let before = serde_json::json!({ "chart": plain.chart, "paused": false });
        let before = fingerprint::sha256_hex(before.to_string().as_bytes());
        assert_eq!(plain.digest(), before);
        let recorded = serde_json::to_value(&plain).unwrap();
        assert!(recorded.get("drift").is_none(), "{recorded}");
        let heals = DesiredState {
            drift: DriftPolicy {
                mode: DriftMode::Heal,
                ..DriftPolicy::default()
            },
            ..plain.clone()
        };
        assert_ne!(heals.digest(), plain.digest());
        assert_eq!(heals.chart.fingerprint(), plain.chart.fingerprint());
        let replaces = DesiredState {
            chart_crds: CrdPolicy::CreateReplace,
            ..plain.clone()
        };
        assert_ne!(replaces.digest(), plain.digest());
        let hasty = DesiredState {
            handling: Handling {
                wait: WaitPolicy::None,
                ..Handling::default()
            },
            ..plain.clone()
        };
        assert_ne!(hasty.digest(), plain.digest());
        assert!(recorded.get("wait").is_none(), "{recorded}");
        let tidy = DesiredState {
            handling: Handling {
                delete_cert_manager_crds: true,
                ..Handling::default()
            },
            ..plain.clone()
        };
        assert_ne!(tidy.digest(), plain.digest());
        for state in [plain, heals, replaces, hasty, tidy] {
            let recorded = serde_json::to_value(&state).unwrap();
            assert_eq!(
                serde_json::from_value::<DesiredState>(recorded).unwrap(),
                state
            );
        }
    }

    #[test]
    fn a_later_epoch_wins_over_a_higher_generation() {
        let old = Version {
            epoch: 1,
            generation: 9,
        };
        assert!(
            Version {
                epoch: 2,
                generation: 1
            } > old
        );
        assert!(
            Version {
                epoch: 1,
                generation: 10
            } > old
        );
    }
}

//! Drift detection: compares the objects of a release with its chart.
//!
//! For each object, a server-side apply of the manifest as a dry run returns the state that Helm would produce. The
//! difference between the response and the live object is the drift. Fields that Helm does not set and the
//! notation of values make no difference.
//!
//! Findings, ignore rules, limits and messages are pure functions. Only `check` and `schedule` send requests.

pub(crate) mod check;
pub(crate) mod difference;
mod field_owner;
mod heal_limit;
pub(crate) mod ignore;
pub(crate) mod json_pointer;
mod kinds;
mod message;
mod object;
pub(crate) mod schedule;

use krypton_helm::releases::ObjectId;
use krypton_types::desired::drift::{DriftMode, DriftPolicy};
use krypton_types::names::{DRIFT_ANNOTATION, DRIFT_IGNORE_ANNOTATION};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::registry::Registry;

pub(crate) use ignore::IgnoreRule;
pub(crate) use message::{correction_event, describe, drift_event, findings_in, with_findings};

/// Helm's field manager, regardless of the name of its binary.
pub(crate) const HELM: &str = "helm";

/// Drift settings of one release.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriftSettings {
    pub mode: DriftMode,
    pub interval_seconds: u32,
    pub rules: Vec<IgnoreRule>,
    /// Error message about annotations of the Tenant that do not parse.
    pub invalid_annotations: Option<String>,
}

impl DriftSettings {
    /// Merges the fleet's policy with the Tenant's annotations. An annotation that does not parse has no effect and is
    /// reported.
    pub fn new<'a>(policy: &DriftPolicy, annotation: impl Fn(&str) -> Option<&'a str>) -> Self {
        let mut invalid_annotations = Vec::new();
        let mut mode = policy.mode;
        if let Some(text) = annotation(DRIFT_ANNOTATION) {
            match text.parse::<DriftMode>() {
                Ok(own_mode) => mode = own_mode,
                Err(error) => invalid_annotations
                    .push(format!("annotation {DRIFT_ANNOTATION}: {text:?}: {error}")),
            }
        }
        let (rules, error) =
            ignore::parse_rules(annotation(DRIFT_IGNORE_ANNOTATION).unwrap_or_default());
        if let Some(error) = error {
            invalid_annotations.push(format!("annotation {DRIFT_IGNORE_ANNOTATION}: {error}"));
        }
        Self {
            mode,
            interval_seconds: policy.interval_seconds.clamp(1, 24 * 60 * 60),
            rules,
            invalid_annotations: (!invalid_annotations.is_empty())
                .then(|| invalid_annotations.join("; ")),
        }
    }
}

/// Drift of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Difference {
    /// The object is deleted.
    Deleted,
    /// JSON pointers of the fields that differ, without their values, which may be secret.
    Fields(Vec<String>),
}

/// An object that differs from its chart, and the outcome.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub object: ObjectId,
    pub difference: Difference,
    /// Field manager that wrote the difference, if known.
    pub writer: Option<String>,
    pub outcome: FindingOutcome,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FindingOutcome {
    /// Reported only.
    ReportedOnly,
    Healed,
    /// It was changed so often that corrections are throttled.
    HeldBack,
    /// The object now belongs to another release.
    OtherRelease(String),
    Failed(String),
}

/// Result of a drift check of one release.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriftReport {
    /// Revision that was checked.
    pub revision: u32,
    pub findings: Vec<Finding>,
    /// Objects that could not be compared, with the reason.
    pub not_compared: Vec<(ObjectId, String)>,
}

/// Counters of the drift checks of all members of a process.
#[derive(Clone, Debug, Default)]
pub struct DriftMetrics {
    pub checks: Counter,
    pub requests: Counter,
    pub objects_found: Counter,
    pub heals: Counter,
    pub heals_failed: Counter,
    pub heals_held_back: Counter,
}

impl DriftMetrics {
    pub fn register(&self, registry: &mut Registry) {
        for (name, help, counter) in [
            ("drift_checks", "Drift checks of releases", &self.checks),
            (
                "drift_requests",
                "API requests of drift checks and corrections",
                &self.requests,
            ),
            (
                "drift_objects_found",
                "Drifted objects found, counted in each check",
                &self.objects_found,
            ),
            (
                "drift_objects_healed",
                "Drifted objects that Krypton corrected",
                &self.heals,
            ),
            (
                "drift_heals_failed",
                "Failed corrections of drifted objects",
                &self.heals_failed,
            ),
            (
                "drift_heals_held_back",
                "Drifted objects not corrected for now because another writer keeps changing them",
                &self.heals_held_back,
            ),
        ] {
            registry.register(name, help, counter.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings_with(mode: Option<&str>, ignore: Option<&str>) -> DriftSettings {
        let policy = DriftPolicy {
            mode: DriftMode::Warn,
            interval_seconds: 60,
        };
        DriftSettings::new(&policy, |name| match name {
            DRIFT_ANNOTATION => mode,
            DRIFT_IGNORE_ANNOTATION => ignore,
            _ => None,
        })
    }

    #[test]
    fn tenant_annotation_overrides_drift_mode_unless_invalid() {
        for (annotation, mode, invalid_annotations) in [
            (None, DriftMode::Warn, false),
            (Some("heal"), DriftMode::Heal, false),
            (Some("off"), DriftMode::Off, false),
            (Some("Heal"), DriftMode::Warn, true),
            (Some(""), DriftMode::Warn, true),
        ] {
            let settings = settings_with(annotation, None);
            assert_eq!(settings.mode, mode, "{annotation:?}");
            let is_invalid = settings.invalid_annotations.is_some();
            assert_eq!(is_invalid, invalid_annotations, "{annotation:?}");
        }
        let settings = settings_with(None, Some("/spec/replicas, spec/image"));
        assert_eq!(settings.rules.len(), 1);
        assert!(settings.invalid_annotations.unwrap().contains("spec/image"));
    }

    #[test]
    fn drift_interval_is_clamped_between_second_and_day() {
        for (interval_seconds, expected) in [(0, 1), (60, 60), (u32::MAX, 86_400)] {
            let policy = DriftPolicy {
                mode: DriftMode::Warn,
                interval_seconds,
            };
            let settings = DriftSettings::new(&policy, |_| None);
            assert_eq!(settings.interval_seconds, expected);
        }
    }
}
